"""A settled quantize job as data: every output matrix, every carried tensor, every shard with its exact layout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import Any, Literal

import numpy as np

from narrowcast._version import __version__
from narrowcast.containers.spelling import Array, Place, Spelling
from narrowcast.hardware.engines import ENGINES, readers
from narrowcast.hardware.tensor_parallel import tp_problems
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.stream import Floats, Slice, Workers
from narrowcast.model.fused import fused_groups
from narrowcast.model.modules import Module
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import Resolved
from narrowcast.numbers.formats import Format
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.writer import Layout, Spec
from narrowcast.tensors.presets import LinearScheme

RECORD, CARD = (
    "narrowcast.json",
    "README.md",
)  # what the job writes beside the weights, for machines and people


# What is done to a matrix: rounded to a scheme, moved with its codes into another spelling or scheme without rounding,
# or decoded to plain floats.
Step = Literal["quantize", "recode", "decode"]


@dataclass(frozen=True)
class Unit:
    """One output matrix: its module name, where it is read from, how and where it is written, and its fused group.

    ``linear`` is None for a decoded matrix. ``statics`` are scales of the source that travel along (an input's scale).
    """

    module: str
    source: Slice | Coded | Floats
    role: str
    dtype: Format
    carrier: np.dtype[Any]
    how: Spelling
    place: Place
    linear: LinearScheme | None
    step: Step = "quantize"
    statics: dict[str, Array] = field(default_factory=dict)
    group: int = 0

    @property
    def nbytes(self) -> int:
        n, k = self.source.shape
        return n * k * self.carrier.itemsize

    @property
    def row_multiple(self) -> int:
        """Rows that a chunk must be a multiple of, for what is read and for what is written."""
        coded = self.source.how.row_multiple if isinstance(self.source, Coded) else 1
        return lcm(coded, self.how.row_multiple)

    @property
    def scheme_name(self) -> str:
        """The scheme of the result, or the dtype of a decoded one."""
        return str(self.how.scheme.name) if self.how.scheme is not None else self.how.format


@dataclass(frozen=True)
class Copy:
    """A tensor that is carried over byte for byte, a slice of a stacked bias under a new name, or a stack of
    ``members``, each of which goes ``to`` its place."""

    name: str
    tensor: str
    nbytes: int
    shape: tuple[int, ...]
    expert: int | None = None
    channels: slice | None = None
    members: tuple[Copy, ...] = ()
    to: Place | None = None


@dataclass(frozen=True)
class Shard:
    """One output file: the same name as the source's, what goes into it, and its exact layout. ``values`` are small
    tensors that the plan knows already, such as the scales of a KV cache under the container's names."""

    name: str
    units: tuple[Unit, ...]
    copies: tuple[Copy, ...]
    values: tuple[tuple[str, Array], ...]
    specs: tuple[Spec, ...]
    metadata: dict[str, str]
    layout: Layout


@dataclass(frozen=True)
class Plan:
    """A quantize job, settled and validated. Sizes in bytes, coverage as shares of the source's weights.

    ``model`` and ``out`` are as they were given, ``root`` and ``place`` are where that is; ``source`` is what was
    seen there. ``side_files`` are relative to ``root``, with their names in the result.
    """

    model: str
    root: Path
    source: dict[str, Any]
    out: Path
    place: Path
    title: str
    container: str
    recipe: Recipe
    resolved: Resolved
    shards: tuple[Shard, ...]
    config: bytes
    index: dict[str, Any] | None
    side_files: tuple[tuple[Path, Path], ...]
    fallbacks: tuple[str, ...]
    warnings: tuple[str, ...]
    coverage_params: float
    coverage_bytes: float
    bits_per_weight: float
    source_bytes: int
    forecast_bytes: int
    workers: int | None
    nonfinite: str
    beside: dict[str, bytes] = field(default_factory=dict)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    verb: str = "quantize"
    requantize: bool = False
    saturate: bool = False
    parent: str | Path | None = None
    calibration: dict[str, Any] | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(unit for shard in self.shards for unit in shard.units)

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """Engines that load every matrix of the plan on some GPU, also where they fuse it with its siblings."""
        groups = [names for names in fused_groups(u.module for u in self.units) if len(names) > 1]
        last = {name: name == names[-1] for names in groups for name in names}
        kinds = {
            (u.linear, u.source.shape, u.how.format, u.role == "expert", last.get(u.module))
            for u in self.units
        }
        common = set(ENGINES) if kinds else set()
        for linear, shape, word, experts, at_end in kinds:
            common &= set(readers(self.container, linear, shape=shape, format=word, experts=experts))
            if linear is not None and at_end is not None:
                common = {name for name in common if not self._cut_inside(name, linear, shape, at_end)}
        return tuple(sorted(common))

    def _cut_inside(self, engine: str, linear: LinearScheme, shape: tuple[int, int], last: bool) -> bool:
        """Whether a block or word is cut off inside a fused layer, which the engine does not take."""
        said = tp_problems(engine, self.container, linear, shape, 1, "column", fused=True, last=last)
        return said is not None

    @property
    def peak_memory(self) -> int:
        """An estimate: the interpreter with the compiler of the kernels, and a few chunks for each worker."""
        chunk = max(
            (
                max(u.source.shape[1] * u.carrier.itemsize * u.row_multiple, u.source.chunk_bytes)
                for u in self.units
            ),
            default=0,
        )
        return (350 << 20) + 6 * chunk * Workers.count_of(self.workers)

    @property
    def formats(self) -> dict[str, int]:
        """Format string to number of matrices."""
        counts: dict[str, int] = {}
        for unit in self.units:
            counts[unit.how.format] = counts.get(unit.how.format, 0) + 1
        return counts

    @property
    def name(self) -> str:
        """What the model is called: its directory's name, or its id on the hub."""
        given = Path(self.model)
        if given.absolute() != self.root:
            return self.model
        return given.name if given.name not in ("", "..") else self.root.resolve().name

    @property
    def modules(self) -> tuple[Module, ...]:
        """The matrices of the source, as recipes name them."""
        return tuple(assignment.module for assignment in self.resolved.assignments)

    def job(self) -> dict[str, Any]:
        """What makes two runs the same job: the source as it was seen, and everything that shapes the bytes."""
        return {
            "narrowcast": __version__,
            **self.source,
            "container": self.container,
            "layout": hashlib.sha256(b"".join(s.layout.header for s in self.shards)).hexdigest(),
            "recipe": [
                f"{unit.module}: {unit.step} {unit.scheme_name} "
                + " ".join(s.rule for s in (unit.how.scheme.scales if unit.how.scheme else ()))
                for unit in self.units
            ],
            "statics": self._statics(),
            "nonfinite": self.nonfinite,
            "requantize": self.requantize,
            "saturate": self.saturate,
        }

    def _statics(self) -> str:
        """SHA-256 over the scales that are not made from weights: of inputs and of the KV cache."""
        digest = hashlib.sha256()
        for unit in self.units:
            for piece, value in unit.statics.items():
                digest.update(f"{unit.module} {piece}\n".encode(errors="surrogateescape") + value.tobytes())
        for shard in self.shards:
            for name, value in shard.values:
                digest.update(f"{name}\n".encode(errors="surrogateescape") + value.tobytes())
        return digest.hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "model": self.model,
            "out": str(self.out),
            "recipe": self.title,
            "container": self.container,
            "formats": self.formats,
            "lines": [
                {"pattern": m.line.pattern.text, "target": m.line.target, "matched": m.count, "taken": m.taken,
                 "examples": list(m.names)}
                for m in self.resolved.matches
            ],
            "kept": {why: {"tensors": count, "bytes": size} for why, (count, size) in self.kept.items()},
            "fallbacks": list(self.fallbacks),
            "warnings": list(self.warnings),
            "coverage": {"parameters": self.coverage_params, "bytes": self.coverage_bytes},
            "bits_per_weight": self.bits_per_weight,
            "source_bytes": self.source_bytes,
            "forecast_bytes": self.forecast_bytes,
            "peak_memory": self.peak_memory,
            "engines": list(self.engines),
            "matrices": len(self.units),
            "calibration": self.calibration,
        }  # fmt: skip


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tells whether the source is still the one that was planned for: headers, sizes, times of change."""
    stamps = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in checkpoint.shards]
    return {"source": source_hash(checkpoint), "stamps": stamps}


def source_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 over the shard headers: names, dtypes, shapes and places of every tensor of the source."""
    digest = hashlib.sha256()
    for name, entry in sorted(checkpoint.entries.items()):
        line = f"{name}\0{entry.dtype.name}\0{list(entry.shape)}\0{entry.path.name}\0{entry.offset}\n"
        digest.update(line.encode(errors="surrogateescape"))  # a file name need not be UTF-8
    return digest.hexdigest()
