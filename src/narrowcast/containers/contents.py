"""What a container finds in a checkpoint: every quantized matrix with its spelling, every cache scale, every oddity.

    entries = parts of matrices ∪ cache scales ∪ what is carried as it is

A container reads the data first and the config second. The scheme of a matrix is what dtypes and shapes say; the
config must agree, and where it does not, both sides are named and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowcast.containers.spelling import Place, Spelling, widened
from narrowcast.errors import CheckpointError
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme


@dataclass(frozen=True)
class Stored:
    """One quantized matrix, or a stack of them, as it lies in the file.

    ``module`` is the path of the module (of a stack: ``...experts.gate_up_proj``), ``shape`` [N, K] of one matrix
    as torch's linear holds it, whatever the stored orientation. ``linear.weight`` is ``how.scheme``, with an outer
    scale that multiplies even where the stored one divides; the input scheme is what the config says.
    ``order`` is how gate and up share the rows of a stack where the format itself fixes it, else None and the model's
    family decides.
    """

    module: str
    shape: tuple[int, int]
    how: Spelling
    linear: LinearScheme
    experts: int | None = None
    order: str | None = None

    @property
    def place(self) -> Place:
        """Where a matrix that is no stack lies."""
        return Place(self.module, self.shape[0], self.experts)

    @property
    def tensors(self) -> list[str]:
        return self.how.names(self.place)


@dataclass(frozen=True)
class CacheScale:
    """A scale of the KV cache: the attention's module path, which of q, k, v (or another), and its tensor."""

    attention: str
    which: str
    tensor: str


@dataclass(frozen=True)
class Contents:
    """A checkpoint as its container sees it.

    ``kv`` names the cache scheme that the config asks for (``fp8``, ``fp8_head``, ``nvfp4``, ...). ``taken``
    are tensors
    that say nothing beyond what is held here (a trivial g_idx, a shape), and ``notes`` what a user should know.
    ``online`` names what the model computes beside its matrices and no other container can say, such as rotations of
    inputs: such a checkpoint is only copied. ``takes`` says whether the config calls a linear layer of a name
    quantized, where it speaks of every one.
    ``metadata`` are keys of the shards' metadata that speak of this container, and stay behind when it is left.
    """

    container: str
    matrices: tuple[Stored, ...] = ()
    cache_scales: tuple[CacheScale, ...] = ()
    kv: str | None = None
    taken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    metadata: frozenset[str] = frozenset()
    side_files: frozenset[str] = field(default_factory=frozenset)
    online: tuple[str, ...] = ()
    takes: Callable[[str], bool] | None = None

    @property
    def consumed(self) -> frozenset[str]:
        """Tensors that a conversion replaces."""
        names = {name for stored in self.matrices for name in stored.tensors}
        return frozenset(names | {scale.tensor for scale in self.cache_scales} | set(self.taken))


@dataclass(frozen=True)
class Source:
    """What a container reads: the open checkpoint, its quantization_config (empty when there is none), and the
    quantization files that lie beside it, by name."""

    checkpoint: Checkpoint
    config: dict[str, Any]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, Entry]:
        return self.checkpoint.entries


def gather(entries: Mapping[str, Entry], suffixes: Iterable[str]) -> dict[str, dict[str, Entry]]:
    """Module path to {suffix: entry}, for every tensor that ends in one of the suffixes; the longest suffix wins."""
    ordered = sorted(suffixes, key=len, reverse=True)
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        suffix = next((s for s in ordered if name.endswith(s)), None)
        if suffix is not None:
            found.setdefault(name.removesuffix(suffix), {})[suffix] = entry
    return found


def left_alone(pattern: str, module: str) -> bool:
    """Whether transformers takes a name of modules_to_not_convert for this module: a pattern that fits from its
    start up to a dot, or its end."""
    try:
        return re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None or module.endswith(pattern)
    except re.error:
        return module == pattern


def contradiction(
    problem: str, source: Source, *, got: object, wanted: object, remedy: str | None = None
) -> CheckpointError:
    """The error for a checkpoint whose data and config disagree."""
    return CheckpointError(problem, where=source.checkpoint.root, got=got, wanted=wanted, remedy=remedy)


def refuse_implausible(source: Source, tensor: str, top: float) -> None:
    """Refuse an outer scale that is read as a multiplier and makes weights of thousands: it is the divisor of another
    container. ``top`` is the largest value under it, so that amax ≤ outer · top; divisors are top / amax."""
    values = widened(source.checkpoint.array(tensor).reshape(-1), source.entries[tensor].dtype.name)
    for value in values:
        if not 0 < value <= 1:
            raise contradiction(
                f"{tensor} is no multiplier of weights: decoded amax {float(value) * top:.2g}, implausible", source,
                got=f"{value:.7g}", wanted=f"amax / {top:g}, which is below 1 for weights below {top:g}",
                remedy="a divisor belongs under weight_global_scale in compressed-tensors",
            )  # fmt: skip
