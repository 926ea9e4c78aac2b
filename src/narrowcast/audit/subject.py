"""What is audited: the checkpoint as far as it opens, what it is for, and what the passes found out.

``Subject`` is what rules of the model's scope are given. Names are those of the unquantized model, expert by expert
and projection by projection (see ``jobs.matching``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowcast.audit.matrix import Matrix
from narrowcast.audit.opening import Found, module_of
from narrowcast.audit.rules import Reads
from narrowcast.containers.contents import Contents
from narrowcast.jobs.coded import Opened
from narrowcast.jobs.matching import Held, held
from narrowcast.kernels import Scan
from narrowcast.kernels.reference.survey import Counts
from narrowcast.model.modules import Module
from narrowcast.model.roles import quantization_config
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.safetensors import Entry

if TYPE_CHECKING:
    from narrowcast.audit.cache_sample import Sample
    from narrowcast.audit.config_said import Kept, Layer
    from narrowcast.audit.pairs import Pair
    from narrowcast.audit.portability import Where
    from narrowcast.hardware.gpus import GPU


@dataclass(frozen=True)
class Summary:
    """What is kept of a matrix after the pass: ``amax`` is the largest decoded magnitude, ``inner`` the least and the
    largest positive innermost scale, ``outer`` and ``input`` multipliers; None for what is absent or was not read.
    ``faint`` is the share of innermost scales that are subnormal in their own eight bits."""

    name: str
    role: str
    scheme: str
    shape: tuple[int, int]
    nbytes: int
    outer: float | None
    input: float | None
    inner: tuple[float, float] | None
    amax: float | None
    faint: float = 0.0


BINADES, ZERO_BINADE = 320, 160  # of FP32 and E8M0 with its subnormals; that of 1.0


@dataclass
class Histograms:
    """What the page draws for one role and scheme: counts of codes, and of innermost scales by power of two (binade
    floor(log2 scale) + 160)."""

    codes: Counts | None = None
    binades: Counts = field(default_factory=lambda: np.zeros(BINADES, np.int64))


@dataclass
class Subject:
    """A checkpoint under audit. ``engine`` (``vllm``, ...), ``gpu`` and ``tp`` are what it shall run on; ``parent`` is
    the model that it was made from, ``sample`` keys and values of a run of it. The passes fill ``matrices``
    (quantized), ``floats`` (plain tensors by name) and ``pairs`` (quantized matrices beside their originals), as far as
    ``depth`` goes."""

    model: str
    found: Found
    depth: Reads
    engine: str | None = None
    gpu: GPU | None = None
    tp: int = 1
    parent: Opened | None = None
    sample: tuple[Sample, ...] = ()
    matrices: dict[str, Summary] = field(default_factory=dict)
    floats: dict[str, Scan] = field(default_factory=dict)
    pairs: dict[str, Pair] = field(default_factory=dict)
    histograms: dict[tuple[str, str], Histograms] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.found.checkpoint

    @property
    def root(self) -> Path:
        return self.checkpoint.root

    @property
    def config(self) -> dict[str, Any]:
        """config.json, empty where there is none."""
        return self.checkpoint.config or {}

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization block of config.json, empty where there is none."""
        return quantization_config(self.config)

    @property
    def opened(self) -> Opened | None:
        return self.found.opened

    @property
    def contents(self) -> Contents | None:
        """What the container found; None where no container reads the checkpoint."""
        return self.opened.contents if self.opened is not None else None

    @property
    def container(self) -> str | None:
        return self.contents.container if self.contents is not None else None

    @property
    def modules(self) -> list[Module]:
        return self.opened.modules if self.opened is not None else []

    @cached_property
    def held(self) -> dict[str, Held]:
        """Every tensor of the model by name, quantized or not; empty where no container reads it."""
        return held(self.opened).found if self.opened is not None else {}

    @cached_property
    def quantized(self) -> dict[str, Held]:
        return {name: one for name, one in self.held.items() if one.coded is not None}

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Every matrix by its raw name, quantized or not, whether a container reads it or not."""
        from narrowcast.audit.config_said import layers

        return layers(self)

    @cached_property
    def pieces(self) -> dict[str, dict[str, Entry]]:
        """Every tensor of the file, also of layers that were set aside: by module, and by what follows its name."""
        found: dict[str, dict[str, Entry]] = {}
        for name, entry in self.checkpoint.entries.items():
            module = module_of(name)
            found.setdefault(module, {})[name[len(module) :]] = entry
        return found

    @cached_property
    def kept(self) -> dict[Kept, list[str]]:
        """Entries of the config that keep layers unquantized, each with the layers that it takes."""
        from narrowcast.audit.config_said import kept, taken

        return taken(kept(self), list(self.layers))

    @cached_property
    def where(self) -> list[Where]:
        """What each engine that is asked about makes of each scheme."""
        from narrowcast.audit.portability import table

        return table(self)

    @cached_property
    def originals(self) -> dict[str, Held]:
        """The parent's tensors by the same names; empty without a parent. A tied head is its embedding."""
        if self.parent is None:
            return {}
        tensors = held(self.parent)
        return tensors.tied | tensors.found

    def summarize(self, matrix: Matrix) -> Summary:
        """What is kept of a matrix."""
        counts = matrix.scale_counts
        values = matrix.scale_values if counts is None else matrix.scale_table[counts > 0]
        usable = values[np.isfinite(values) & (values > 0)]
        inner = (float(usable.min()), float(usable.max())) if usable.size else None
        return Summary(
            matrix.name, matrix.role, matrix.scheme.name, matrix.shape, matrix.held.nbytes, matrix.outer,
            matrix.input, inner, matrix.amax, _faint(matrix),
        )  # fmt: skip

    def add(self, matrix: Matrix, summary: Summary) -> None:
        """Count a matrix in; called by one thread."""
        self.matrices[summary.name] = summary
        drawn = self.histograms.setdefault((summary.role, summary.scheme), Histograms())
        if matrix.counts is not None:
            drawn.codes = matrix.counts if drawn.codes is None else drawn.codes + matrix.counts
        drawn.binades += _binades(matrix)


def _faint(matrix: Matrix) -> float:
    smallest = matrix.scale_format.smallest_normal
    if matrix.scale_counts is None or smallest is None:
        return 0.0
    values = np.where(np.isfinite(matrix.scale_table), matrix.scale_table, 0)
    return float(matrix.scale_counts[(values > 0) & (values < smallest)].sum() / max(matrix.scales.size, 1))


def _binades(matrix: Matrix) -> Counts:
    """Innermost scales by power of two: of bytes by their counts, of wider ones by the exponent fields of their
    float32 patterns, which is quicker than their logarithms."""
    found = np.zeros(BINADES, np.int64)
    if matrix.scale_counts is not None:
        values, weights = matrix.scale_table, matrix.scale_counts
    else:
        values = np.ascontiguousarray(matrix.scale_values, np.float32).reshape(-1)
        fields = np.bincount(values.view(np.uint32) >> 23, minlength=512)  # negative ones lie above 255
        found[1 + ZERO_BINADE - 127 : 255 + ZERO_BINADE - 127] = fields[1:255]
        if not fields[0]:
            return found
        values = values[(values > 0) & (values < 2.0**-126)]
        weights = np.ones(values.size, np.int64)
    usable = np.isfinite(values) & (values > 0)
    exponents = np.frexp(values[usable])[1].astype(np.int64) - 1 + ZERO_BINADE
    return found + np.bincount(np.clip(exponents, 0, BINADES - 1), weights[usable], BINADES).astype(np.int64)
