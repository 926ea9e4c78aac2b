"""An accelerator as a row: memory, bandwidth, dense peaks, what its matrix units multiply, and who says so.

An instruction for a format is one of three conditions for low-precision arithmetic; the engine needs a kernel that
uses it, and the activations must be quantized too. ``formats`` is the first of the three: element formats by name,
and ``mxfp8``, ``mxfp6``, ``mxfp4`` and ``nvfp4`` where the block scales are applied inside the matrix unit. They
follow from the architecture and stand here once per architecture. MI300 reads its eight bits as E4M3FNUZ, so that an
E4M3FN byte means half as much there.

    peak      what the vendor prints for dense operands, accumulated in FP32 where the card has a choice
    achieved  what the largest products reached in published measurements

Where sources disagree, memory and peaks are the lower number and bandwidth is the upper, by which a bound on a step
that waits for bytes stays one; a note names the other. A bound on products takes ``fastest``.

Every number has a source and the day on which that source was read. Left out: rates for operands of which half are
zero, twice as much on marketing pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# The columns of peaks, and the formats that a matrix unit must take for one of them.
COLUMNS: Mapping[str, frozenset[str]] = {
    "fp32": frozenset(),
    "tf32": frozenset({"bf16"}),  # they came together
    "bf16": frozenset({"bf16"}),
    "fp16": frozenset({"fp16"}),
    "fp8": frozenset({"e4m3fn", "e4m3fnuz", "e4m3_ieee"}),
    "int8": frozenset({"int8"}),
    "fp6": frozenset({"mxfp6"}),
    "fp4": frozenset({"mxfp4", "nvfp4"}),
    "int4": frozenset({"int4"}),
}
# What notes and sources can be about.
SUBJECTS = ("memory", "bandwidth", *COLUMNS, "achieved")

_TURING = frozenset({"fp16", "int8", "int4"})
_HOPPER = frozenset({"bf16", "fp16", "int8", "e4m3fn", "e5m2"})
_AMPERE = frozenset({"bf16", "fp16", "int8", "int4"})
_BLACKWELL = _HOPPER | {"mxfp8", "mxfp6", "mxfp4", "nvfp4"}
_CDNA2 = frozenset({"bf16", "fp16", "int8"})
# INT4 left NVIDIA's matrix units with Hopper; the instruction that remains is emulated.
NATIVE: Mapping[str, frozenset[str]] = {
    "sm70": frozenset({"fp16"}),
    "sm75": _TURING,
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm87": _AMPERE,
    "sm89": _AMPERE | {"e4m3fn", "e5m2"},
    "sm90": _HOPPER,
    "sm100": _BLACKWELL,
    "sm103": _BLACKWELL,
    "sm120": _BLACKWELL,
    "sm121": _BLACKWELL,
    "gfx90a": _CDNA2,
    "gfx942": _CDNA2 | {"e4m3fnuz", "e5m2fnuz"},
    "gfx950": _CDNA2 | {"e4m3fn", "e5m2", "mxfp8", "mxfp6", "mxfp4"},
}

_VENDORS = {"sm": "nvidia", "gfx": "amd"}


def capability_of(arch: str | None) -> tuple[int, int] | None:
    """(8, 9) of sm89, (12, 0) of sm120; None of what is not NVIDIA's."""
    found = re.fullmatch(r"sm(\d+)(\d)", arch or "")
    return None if found is None else (int(found[1]), int(found[2]))


def vendor_of(arch: str | None) -> str | None:
    """Whose architecture it is; None where the name does not tell."""
    return next((vendor for start, vendor in _VENDORS.items() if (arch or "").startswith(start)), None)


class Source(NamedTuple):
    """Who says a number, and the day on which it was read there."""

    words: str
    date: str

    def __str__(self) -> str:
        return f"{self.words} ({self.date})"


@dataclass(frozen=True)
class GPU:
    """One accelerator: ``arch`` as its compiler calls it, ``capability`` of NVIDIA's (major, minor), memory in GB and
    bandwidth in TB/s, ``peaks`` and ``achieved`` in TFLOPS (integers: TOPS) by column. None and a column that is not
    there are unknown, or the unit is not there.

    ``notes`` says by text what it is about: columns, memory, bandwidth; nothing named is the whole card. ``source``
    is of every number that ``sources`` does not name; ``achieved`` in it is of all that was measured. ``faster`` are
    rates above a peak that engines can reach: accumulated as their kernels do, or at clocks above the printed one.
    ``seen_gib`` is the memory that programs see.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    arch: str | None
    capability: tuple[int, int] | None
    memory_gb: float | None
    bandwidth_tb_s: float | None
    formats: frozenset[str]
    source: Source
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    achieved: Mapping[str, float] = field(default_factory=dict, hash=False)
    notes: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)
    faster: Mapping[str, float] = field(default_factory=dict, hash=False)
    seen_gib: float | None = None

    @property
    def sm(self) -> int | None:
        """The capability as compilers and engines spell it: 89 for (8, 9)."""
        return None if self.capability is None else 10 * self.capability[0] + self.capability[1]

    @property
    def memory(self) -> float | None:
        """Bytes of memory."""
        return None if self.memory_gb is None else self.memory_gb * 1e9

    @property
    def usable(self) -> float | None:
        """Bytes that programs see of it, which are more or fewer than it is sold with; those where nothing else is
        known."""
        if self.memory is None or self.seen_gib is None:
            return self.memory
        return self.seen_gib * 2**30

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return None if self.bandwidth_tb_s is None else self.bandwidth_tb_s * 1e12

    def peak(self, arithmetic: str) -> float | None:
        """Dense FLOP (integer operations) a second in fp32, tf32, bf16, fp16, fp8, int8, fp6, fp4 or int4, accumulated
        as engines do; None where it is not known or the unit is not there."""
        tera = self.peaks.get(arithmetic)
        return None if tera is None else tera * 1e12

    def fastest(self, arithmetic: str) -> float | None:
        """The rate that bounds a product: the peak, or what is known to be faster; None where the peak is not known."""
        peak = self.peak(arithmetic)
        return None if peak is None else max(peak, self.faster.get(arithmetic, 0) * 1e12)

    def achievable(self, arithmetic: str) -> float | None:
        """FLOP a second that large products reached in published measurements."""
        tera = self.achieved.get(arithmetic)
        return None if tera is None else tera * 1e12

    def multiplies(self, column: str) -> bool:
        """Whether the matrix units take operands of a column's kind: False for fp8 on an A100."""
        return not COLUMNS[column] or bool(COLUMNS[column] & self.formats)

    @property
    def fp8_kind(self) -> str | None:
        """How eight bits are read: fn, fnuz (half as much), ieee (to 240 only); None without FP8."""
        kinds = {"e4m3fn": "fn", "e4m3fnuz": "fnuz", "e4m3_ieee": "ieee"}
        return next((kind for name, kind in kinds.items() if name in self.formats), None)

    def notes_about(self, *subjects: str) -> tuple[str, ...]:
        """The notes that matter to these columns, ``memory`` or ``bandwidth``, and those about the whole card."""
        return tuple(text for text, about in self.notes.items() if not about or about & set(subjects))

    def source_of(self, subject: str) -> Source:
        """Who says a peak, ``memory`` or ``bandwidth``, and with ``achieved`` who measured."""
        return self.sources.get(subject, self.source)
