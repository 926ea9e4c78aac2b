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
from importlib import import_module

from narrowcast.errors import UsageError
from narrowcast.hardware.engines.row import UNKNOWN, WEIGHT_ONLY, Engine, Kernel, Path, Reach, Row
from narrowcast.hardware.gpus import GPU, gpus
from narrowcast.hardware.kinds import input_kind, weight_kind
from narrowcast.tensors.presets import LinearScheme

__all__ = ["Engine", "Engines", "Kernel", "Path", "Reach", "Row", "engines", "paths"]

_KNOWN = ("h100", "b200", "mi355x", "mi300x")
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
    found = engines[engine]
    weight, inputs = weight_kind(linear.weight), input_kind(linear)
    rows = [
        row for row in found.rows if row.fits(container, weight, inputs, format, experts, linear.weight.group)
    ]
    if gpu is not None:
        return _on(found, rows, linear, gpu, shape, container)
    return _anywhere(
        found, [(each, _on(found, rows, linear, each, shape, container)) for each in gpus.values()]
    )


def _on(
    engine: Engine,
    rows: list[Row],
    linear: LinearScheme,
    gpu: GPU,
    shape: tuple[int, int] | None,
    container: str,
) -> Path:
    """The path on one GPU: the first of the rows that reaches it, and the kernels of its family that fit."""
    if not engine.gpus.holds(gpu):
        problem = f"{engine.title} {engine.version} on {gpu.name}: no kernels known here"
        return _refused(engine, problem, "choose a GPU that this version of the table covers", engine.source)
    row = next((row for row in rows if row.reach.holds(gpu)), None)
    if row is None:
        if not rows:
            return _refused(engine, engine.unread.format(container=container), engine.remedy, engine.source)
        reason = f"no kernel for {linear.weight.name} with {input_kind(linear)} inputs on {gpu.name}"
        return _refused(engine, reason, _where(rows), rows[0].source)
    if row.refusal is not None:
        return _refused(engine, row.refusal, row.remedy, row.source, row.notes)
    reached = [kernel for kernel in row.family if kernel.reach.holds(gpu)]
    fitting = [kernel for kernel in reached if kernel.takes(linear, shape)]
    if not fitting:
        reason = row.failure or _no_kernel(linear, gpu, shape, reached)
        return _refused(engine, reason, row.remedy or _where(rows), row.source, row.notes)
    return _accepted(engine, row, linear, gpu, fitting)


def _accepted(engine: Engine, row: Row, linear: LinearScheme, gpu: GPU, fitting: list[Kernel]) -> Path:
    default = [kernel for kernel in fitting if not kernel.package]
    running = default or fitting
    first = running[0]
    ahead = fitting[: fitting.index(first)] if default else []
    notes = [*row.notes, *(kernel.note for kernel in running[:1] if kernel.note)]
    notes += [f"with {kernel.package} installed: {kernel.name}, {kernel.arithmetic}" for kernel in ahead]
    if not default:
        notes.append(f"only with {first.package} installed")
    if linear.input is not None and first.arithmetic == WEIGHT_ONLY:
        notes.append("the inputs stay wide, whatever the checkpoint says of them")
    if "e4m3fnuz" in gpu.formats and linear.weight.element.name == "e4m3fn" and first.arithmetic == "fp8":
        notes += [note for note in gpu.notes if "FNUZ" in note]
    if first.arithmetic == "int8":
        notes += [note for note in gpu.notes if note.startswith("INT8 is given")]
    return Path(
        engine.name, engine.version, tuple(dict.fromkeys(kernel.name for kernel in running)), first.arithmetic,
        first.arithmetic.startswith("bf16: weight") or first.arithmetic.startswith("bf16: dequantized"),
        None, None, tuple(notes), row.source or engine.source, "" if default else first.package,
    )  # fmt: skip


def _refused(
    engine: Engine, reason: str, remedy: str | None, source: str, notes: tuple[str, ...] = ()
) -> Path:  # fmt: skip
    return Path(
        engine.name, engine.version, (), UNKNOWN, False, reason, remedy, notes, source or engine.source
    )  # fmt: skip


def _no_kernel(linear: LinearScheme, gpu: GPU, shape: tuple[int, int] | None, reached: list[Kernel]) -> str:
    what = f"{linear.weight.name} with {input_kind(linear)} inputs"
    if shape is not None and any(kernel.takes(linear, None) for kernel in reached):
        return f"no kernel on {gpu.name} computes {what} at {shape[0]}x{shape[1]}"
    return f"no kernel on {gpu.name} computes {what}"


def _where(rows: list[Row]) -> str | None:
    """The GPUs that a refused layer runs on, as a remedy."""
    fit = [row.reach for row in rows if row.refusal is None]
    lows = [reach.low for reach in fit if reach.low]
    amd = sorted({arch for reach in fit for arch in reach.archs if arch.startswith("gfx")})
    words = [f"NVIDIA from compute capability {_dotted(min(lows))}"] if lows else []
    words += [f"AMD {', '.join(amd)}"] if amd else []
    return f"runs on {' and '.join(words)}" if words else None


def _anywhere(engine: Engine, found: list[tuple[GPU, Path]]) -> Path:
    """The best of all GPUs: real low precision before the rest, and from which capability each begins."""
    runs = [(gpu, path) for gpu, path in found if path.refusal is None]
    if not runs:
        # Every GPU refuses; the reason that most of the table meets is the one to tell.
        return _shown(found)
    runs = [(gpu, path) for gpu, path in runs if not path.package] or runs
    real = [(gpu, path) for gpu, path in runs if path.low_precision]
    best = _shown(real or runs)
    notes = [*best.notes, _from("runs", [gpu for gpu, _ in runs])]
    if real and len(real) < len(runs):
        notes.append(_from(f"computes in {best.arithmetic}", [gpu for gpu, _ in real]))
    kept = tuple(note for note in dict.fromkeys(notes) if "FNUZ" not in note)
    return Path(
        engine.name, engine.version, best.kernels, best.arithmetic, best.weight_only, None, None, kept, best.source,
        best.package,
    )  # fmt: skip


def _shown(found: list[tuple[GPU, Path]]) -> Path:
    """The path of the GPU that most people would name among these."""
    by_name = {gpu.name: path for gpu, path in found}
    return next((by_name[name] for name in _KNOWN if name in by_name), found[0][1])


def _from(what: str, where: list[GPU]) -> str:
    lows = [gpu.sm for gpu in where if gpu.sm is not None]
    archs = sorted({gpu.arch for gpu in where if gpu.sm is None and gpu.arch is not None})
    words = [f"NVIDIA from compute capability {_dotted(min(lows))}"] if lows else []
    return f"{what} on {', '.join([*words, *archs])}"


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
