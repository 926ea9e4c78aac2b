"""What engines do with a container's linear layers on a GPU, and why: one table per engine and version.

    paths("vllm", "compressed-tensors", presets["fp8_dynamic"].linear, gpus["l4"])   →  CutlassFP8, fp8
    paths("vllm", "compressed-tensors", presets["fp8_dynamic"].linear, gpus["a100"]) →  MarlinFP8, bf16: weight only

Low-precision arithmetic takes three things: an instruction, a kernel that uses it, and quantized inputs. Where one is
missing, engines keep the small weights and multiply in 16 bits, or emulate, or refuse. What the default installation
has comes first; kernels of optional packages are named in the notes, and are the answer only where nothing else is.

Left out: flags and environment variables that force another kernel, except where a remedy names one; and what is
decided by the size of a batch at run time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module

from narrowcast.errors import UsageError
from narrowcast.hardware.engines.choosing import Layer
from narrowcast.hardware.engines.row import ENGINES, Engine, Kernel, Path, Reach, Row
from narrowcast.hardware.gpus import GPU
from narrowcast.tensors.presets import LinearScheme

__all__ = ["ENGINES", "Engine", "Engines", "Kernel", "Path", "Reach", "Row", "engines", "paths", "readers"]


ALIASES: Mapping[str, str] = {"trtllm": "tensorrt-llm", "trt-llm": "tensorrt-llm"}


class Engines(Mapping[str, Engine]):
    """The engines by name, each imported when it is asked for; unknown names are refused with the nearest ones."""

    def __getitem__(self, name: str) -> Engine:
        key = name.lower().replace("_", "-")
        key = ALIASES.get(key, key)
        if key not in ENGINES:
            near = difflib.get_close_matches(key, ENGINES, 2)
            remedy = f"did you mean {', '.join(near)}?" if near else None
            raise UsageError("unknown engine", got=name, wanted=", ".join(ENGINES), remedy=remedy)
        found: Engine = import_module(f"narrowcast.hardware.engines.{key.replace('-', '_')}").ENGINE
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(ENGINES)

    def __len__(self) -> int:
        return len(ENGINES)


engines = Engines()


@lru_cache(4096)
def paths(
    engine: str,
    container: str,
    linear: LinearScheme,
    gpu: GPU | None = None,
    *,
    shape: tuple[int, int] | None = None,
    format: str | None = None,
    experts: bool = False,
) -> Path:
    """What ``engine`` makes of a layer that computes ``linear`` and is stored in ``container``.

    ``gpu`` None asks whether any of its GPUs runs it: the answer is the best of them, and the notes say from which
    capability on. ``shape`` [N, K] is what one rank holds, ``format`` the container's own word for the layer
    (``Spelling.format``), ``experts`` whether the layer is a routed expert. UsageError for an unknown engine.
    """
    layer = Layer(engines[engine], container, linear, shape, format, experts)
    return layer.anywhere() if gpu is None else layer.on(gpu)


def readers(
    container: str,
    linear: LinearScheme | None,
    *,
    shape: tuple[int, int] | None = None,
    format: str | None = None,
    experts: bool = False,
) -> tuple[str, ...]:
    """The engines that load such a layer on some GPU, by name; see ``paths``. ``linear`` None is a layer of plain
    floats, which all of them load."""
    if linear is None:
        return tuple(ENGINES)
    about = {"shape": shape, "format": format, "experts": experts}
    return tuple(name for name in ENGINES if paths(name, container, linear, **about).refusal is None)
