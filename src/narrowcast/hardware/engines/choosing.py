"""From the rows of an engine to the answer about one layer: on one GPU, or on any.

    on(gpu)      the first row that fits and reaches the GPU, and of its family the kernels that fit
    anywhere()   the answers of all GPUs: the best of them, and which GPUs share it

A general row is how a container refuses what it does not know; it is not the reason where other GPUs run
the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from narrowcast.hardware.engines.row import DEQUANTIZED, UNKNOWN, WEIGHT_ONLY, Engine, Kernel, Path, Row
from narrowcast.hardware.gpus import FNUZ, GPU, INT8_SLOW, gpus
from narrowcast.hardware.kinds import WIDE, input_kind, weight_kind
from narrowcast.tensors.presets import LinearScheme

# Of several GPUs, the one whose answer is shown.
_SHOWN = ("h100", "b200", "mi355x", "mi300x")


@dataclass(frozen=True)
class Layer:
    """One layer as an engine meets it."""

    engine: Engine
    container: str
    linear: LinearScheme
    shape: tuple[int, int] | None
    format: str | None
    experts: bool

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The engine's rows about such a layer, whatever the GPU."""
        weight, group = weight_kind(self.linear.weight), self.linear.weight.group
        about = (self.container, weight, self.inputs, self.format, self.experts, group, self.cut)
        return tuple(row for row in self.engine.rows if row.fits(*about))

    @cached_property
    def inputs(self) -> str:
        """The kind of its input."""
        return input_kind(self.linear)

    @property
    def cut(self) -> bool:
        """Whether the last of several tiles is cut off by an edge of the matrix."""
        return self.shape is not None and any(
            0 < size < length and length % size
            for length, size in zip(self.shape, self.linear.weight.inner.tile, strict=True)
        )

    def on(self, gpu: GPU) -> Path:
        """The path on one GPU; a refusal without a remedy of its own names the GPUs that run the layer."""
        path = self._on(gpu)
        if path.refusal is None or path.remedy is not None:
            return path
        others = [each for each in gpus.values() if self._on(each).refusal is None]
        return self._refused(path.refusal, f"runs on {_names(others)}" if others else None, path.notes)

    def anywhere(self) -> Path:
        """The best of all GPUs: what needs no further package and is really low precision before the rest."""
        found = self._everywhere()
        runs = {name: path for name, path in found.items() if path.refusal is None}
        if not runs:
            return _shown(found)
        runs = {name: path for name, path in runs.items() if not path.package} or runs
        real = {name: path for name, path in runs.items() if path.low_precision}
        best = _shown(real or runs)
        notes = [*best.notes, f"runs on {_names([gpus[name] for name in runs])}"]
        if real and len(real) < len(runs):
            notes.append(f"computes in {best.arithmetic} on {_names([gpus[name] for name in real])}")
        return self._path(best.kernels, best.arithmetic, tuple(notes), best.package)

    def _everywhere(self) -> dict[str, Path]:
        """The answer on each GPU. Those of one architecture share it; a refusal names its GPU."""
        shared: dict[tuple[object, ...], Path] = {}
        found = {}
        for gpu in gpus.values():
            alike = (gpu.arch, gpu.capability, FNUZ in gpu.notes)
            path = shared.get(alike)
            if path is None or path.refusal is not None:
                path = shared[alike] = self._on(gpu)
            found[gpu.name] = path
        return found

    def _on(self, gpu: GPU) -> Path:
        if not self.engine.gpus.holds(gpu):
            return self._refused(
                f"{self.engine.title} {self.engine.version} on {gpu.name}: no kernels known here",
                "choose a GPU that this version of the table covers",
            )
        if not self.rows:
            return self._refused(self.engine.unread.format(container=self.container), self.engine.remedy)
        row = next((row for row in self.rows if row.reach.holds(gpu)), None)
        if row is None or (row.general and any(each.weights and each.family for each in self.rows)):
            return self._refused(f"not supported on {gpu.name}: {self._what()}", None)
        if row.refusal is not None:
            slow = (INT8_SLOW,) if self.inputs.startswith("int8") and INT8_SLOW in gpu.notes else ()
            return self._refused(row.refusal, row.remedy, (*row.notes, *slow))
        reached = [kernel for kernel in row.family if kernel.reach.holds(gpu)]
        fitting = [kernel for kernel in reached if kernel.takes(self.linear, self.shape)]
        if not fitting:
            return self._refused(row.failure or self._no_kernel(gpu, reached), row.remedy, row.notes)
        return self._accepted(row, gpu, fitting)

    def _accepted(self, row: Row, gpu: GPU, fitting: list[Kernel]) -> Path:
        default = [kernel for kernel in fitting if not kernel.package]
        running = default or fitting
        first = running[0]
        notes = [*row.notes, first.note, *_ahead(fitting, first, bool(default))]
        if self.inputs != WIDE and first.arithmetic == WEIGHT_ONLY:
            notes.append("the inputs stay wide, whatever the checkpoint says of them")
        if self.inputs == WIDE and first.arithmetic in ("mxfp4", "mxfp8"):
            notes.append("the engine quantizes the inputs, although the checkpoint keeps them wide")
        if FNUZ in gpu.notes and self.linear.weight.element.name == "e4m3fn" and first.arithmetic == "fp8":
            notes.append(FNUZ)
        names = tuple(dict.fromkeys(kernel.name for kernel in running))
        return self._path(
            names, first.arithmetic, tuple(filter(None, notes)), "" if default else first.package
        )

    def _path(self, kernels: tuple[str, ...], arithmetic: str, notes: tuple[str, ...], package: str) -> Path:
        engine, wide = self.engine, arithmetic in (WEIGHT_ONLY, DEQUANTIZED)
        return Path(
            engine.name, engine.version, kernels, arithmetic, wide, None, None, notes, engine.source, package
        )  # fmt: skip

    def _refused(self, reason: str, remedy: str | None, notes: tuple[str, ...] = ()) -> Path:
        engine = self.engine
        return Path(engine.name, engine.version, (), UNKNOWN, False, reason, remedy, notes, engine.source)

    def _what(self) -> str:
        return f"{self.linear.weight.name} with {self.inputs} inputs"

    def _no_kernel(self, gpu: GPU, reached: list[Kernel]) -> str:
        at = ""
        if self.shape is not None and any(kernel.takes(self.linear, None) for kernel in reached):
            at = f" at {self.shape[0]}x{self.shape[1]}"
        return f"no kernel on {gpu.name} computes {self._what()}{at}"


def _ahead(fitting: list[Kernel], first: Kernel, default: bool) -> list[str]:
    """What optional packages would change."""
    if not default:
        return [f"only with {first.package} installed"]
    names: dict[str, dict[str, None]] = {}
    for kernel in fitting[: fitting.index(first)]:
        names.setdefault(kernel.package, {})[kernel.name] = None
    return [
        f"with {package} installed, {', '.join(each)} would come before" for package, each in names.items()
    ]


def _shown(found: dict[str, Path]) -> Path:
    return next((found[name] for name in _SHOWN if name in found), next(iter(found.values())))


def _names(where: list[GPU]) -> str:
    """GPUs by capability and architecture: "NVIDIA from compute capability 8.9, gfx942"."""
    held = sorted({gpu.sm for gpu in where if gpu.sm is not None})
    every = sorted({gpu.sm for gpu in gpus.values() if gpu.sm is not None})
    archs = sorted({gpu.arch for gpu in where if gpu.sm is None and gpu.arch is not None})
    if not held:
        return ", ".join(archs)
    low, high = (f"{sm // 10}.{sm % 10}" for sm in (held[0], held[-1]))
    upward = held[-1] == every[-1]
    span = f"from compute capability {low}" if upward else f"of compute capability {low}"
    return ", ".join([f"NVIDIA {span}" + ("" if upward or low == high else f" to {high}"), *archs])
