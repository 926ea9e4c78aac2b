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
from narrowcast.hardware.engines.row import Engine, Kernel, Path, Reach, Row
from narrowcast.hardware.gpus import GPU
from narrowcast.tensors.presets import LinearScheme

__all__ = ["Engine", "Engines", "Kernel", "Path", "Reach", "Row", "engines", "paths"]

# Name to module; imported when it is asked for.
_MODULES: Mapping[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm",
    "transformers": "transformers",
}


class Engines(Mapping[str, Engine]):
    """The engines by name; unknown names are refused with the nearest ones."""

    def __getitem__(self, name: str) -> Engine:
        key = name.lower().replace("_", "-")
        if key not in _MODULES:
            near = difflib.get_close_matches(key, _MODULES, 2)
            remedy = f"did you mean {', '.join(near)}?" if near else None
            raise UsageError("unknown engine", got=name, wanted=", ".join(_MODULES), remedy=remedy)
        found: Engine = import_module(f"narrowcast.hardware.engines.{_MODULES[key]}").ENGINE
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


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
