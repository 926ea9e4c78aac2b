"""The table's types: which GPUs a thing reaches, kernels, families of kernels in the engine's order, and rows.

    row     = container × weight kind × input kind × GPUs  →  family | refusal
    family  = kernels in the engine's order of preference
    kernel  = GPUs × shapes × groups × scales  →  arithmetic

The first row that fits decides, and of its family the kernels that fit remain, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.hardware.gpus import GPU
from narrowcast.tensors.presets import LinearScheme

# Engines by name, as people write them.
ENGINES: Mapping[str, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "transformers": "transformers",
}

WEIGHT_ONLY = "bf16: weight only"
EMULATED = "bf16: emulated"
DEQUANTIZED = "bf16: dequantized"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reach:
    """NVIDIA GPUs from one capability to another, both included, and accelerators of these architectures. A ``low`` of
    None reaches no NVIDIA GPU."""

    low: int | None = None
    high: int = 999
    archs: tuple[str, ...] = ()

    def holds(self, gpu: GPU) -> bool:
        """Whether the GPU is one of them."""
        if gpu.sm is not None:
            return self.low is not None and self.low <= gpu.sm <= self.high
        return gpu.arch is not None and gpu.arch in self.archs


def sm(low: int, high: int = 999) -> Reach:
    """NVIDIA GPUs by capability."""
    return Reach(low, high)


CDNA3, CDNA4, ROCM, CPU = ("gfx942", "gfx950"), ("gfx950",), ("gfx90a", "gfx942", "gfx950"), ("cpu",)
ANY = Reach(0, 999, ROCM + CPU)
CUDA = Reach(0)
AMD = Reach(archs=ROCM)
ON_CPU = Reach(archs=CPU)


def _everything(linear: LinearScheme) -> bool:
    return True


@dataclass(frozen=True)
class Kernel:
    """A kernel by its short name: what it computes in, where, and what it asks of a layer.

    ``arithmetic`` is the precision of the product: a format, or one of the "bf16: ..." words. ``groups`` are the group
    sizes that it takes (0: a whole row; None: any). N and K must be multiples of ``multiples`` and at least ``least``.
    ``package`` is an optional package without which it does not exist.
    """

    name: str
    arithmetic: str
    reach: Reach
    multiples: tuple[int, int] = (1, 1)
    least: int = 1
    groups: tuple[int, ...] | None = None
    fits: Callable[[LinearScheme], bool] = _everything
    package: str = ""
    note: str = ""

    def takes(self, linear: LinearScheme, shape: tuple[int, int] | None) -> bool:
        """Whether the layer is one that it can compute, on a GPU that it reaches."""
        if self.groups is not None and linear.weight.group not in self.groups:
            return False
        if shape is not None:
            n, k = shape
            if min(n, k) < self.least or n % self.multiples[0] or k % self.multiples[1]:
                return False
        return self.fits(linear)


@dataclass(frozen=True)
class Row:
    """One entry: what it fits, and the family of kernels or the refusal.

    ``formats`` limits it to these words of the container (none: any word); ``experts`` to layers that are routed
    experts (True) or are not (False); ``groups`` to group sizes; ``cut`` to matrices whose edge cuts a tile.
    ``failure`` is what is said where no kernel of the family is left.
    """

    containers: tuple[str, ...]
    weights: tuple[str, ...]
    inputs: tuple[str, ...]
    family: tuple[Kernel, ...] = ()
    reach: Reach = ANY
    formats: tuple[str, ...] = ()
    experts: bool | None = None
    groups: tuple[int, ...] | None = None
    cut: bool = False
    refusal: str | None = None
    remedy: str | None = None
    notes: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def general(self) -> bool:
        """Whether it names neither weights nor inputs nor words: the last row of a container."""
        return not (self.weights or self.inputs or self.formats)

    def fits(
        self, container: str, weight: str, inputs: str, format: str | None, experts: bool, group: int, cut: bool
    ) -> bool:  # fmt: skip
        """Whether the row is about such a layer, on whatever GPU."""
        return (
            (not self.containers or container in self.containers)
            and (not self.weights or weight in self.weights)
            and (not self.inputs or inputs in self.inputs)
            and (not self.formats or format in self.formats)
            and (self.experts is None or self.experts is experts)
            and (self.groups is None or group in self.groups)
            and (cut or not self.cut)
        )


Names = str | tuple[str, ...]


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def row(containers: Names, weights: Names = (), inputs: Names = (), **more: Any) -> Row:
    """A row whose names may stand alone; ``more`` are the row's other fields."""
    return Row(_tuple(containers), _tuple(weights), _tuple(inputs), **more)


@dataclass(frozen=True)
class Engine:
    """An engine at a version, its rows in order, and how it refuses what no row fits."""

    name: str
    version: str
    rows: tuple[Row, ...]
    unread: str
    remedy: str
    gpus: Reach
    source: str

    @property
    def title(self) -> str:
        """The name as people write it."""
        return ENGINES[self.name]


@dataclass(frozen=True)
class Path:
    """What an engine makes of a layer on a GPU: kernels in the order in which it would take them, the arithmetic of
    the first, and whether inputs stay wide; or the refusal with the engine's reason and what would change it.
    ``package`` is the optional package without which no kernel is left."""

    engine: str
    version: str
    kernels: tuple[str, ...]
    arithmetic: str
    weight_only: bool
    refusal: str | None
    remedy: str | None
    notes: tuple[str, ...]
    source: str
    package: str = ""

    @property
    def low_precision(self) -> bool:
        """Whether the product is really computed in a low precision."""
        return self.refusal is None and not self.arithmetic.startswith("bf16") and self.arithmetic != UNKNOWN
