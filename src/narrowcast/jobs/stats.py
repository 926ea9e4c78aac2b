"""What calibration saw: the magnitudes that entered each linear, and those of keys, values and queries, in one file.

    counts[b]      elements with edge[b - 1] < |x| ≤ edge[b]        16 edges an octave, from 2^-24 to 2^24
    pieces[p]      max |x| over one piece of text, in the order of the pieces
    channels[c]    max |x| of one input channel (of keys, values and queries: of one head)
    tokens         rows that were seen

From these follow, exactly or to an edge:

    amax           max of channels
    pN             the smallest edge that N % of the elements do not pass, at most amax        (p99.9, p99.99)
    ema            m ← m + 0.01 · (a_p - m), beginning with a_0        torch's moving average, constant 0.01
    delayed        max of the last 1024 a_p                            Transformer Engine's delayed scaling

A piece without elements (an expert that no token chose) leaves ema and delayed as they are. Two files of one model
merge: counts and tokens add, channels take the larger, pieces follow each other; so the merge is what one run over
both texts gives, to the bit. 448 is an edge, so the share beyond it is exact.

The edges of a bin are the numbers whose fp32 mantissa ends after four bits, so a bin is an integer operation on the
bits of |x|, the same on every machine. What passes 2^24 falls into the last bin, what is below 2^-24 into the first.

The file is safetensors. Its metadata says whose statistics they are (``fingerprint``), of which text and how much.
Names that saw the same input store it once. Left out: second moments, which no static scale asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast._version import __version__
from narrowcast.errors import InputError, UsageError
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Reader, Spec, Writer

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
SCHEMA = "narrowcast-stats-1"
LOWEST, HIGHEST, SHIFT = (
    -24,
    24,
    19,
)  # exponents of the first and last edge; bits of fp32 below four of mantissa
FIRST = (LOWEST + 127) << 4
BINS = ((HIGHEST - LOWEST) << 4) + 1
SMOOTHING, HISTORY = 0.01, 1024
STARVED = 16  # tokens: an expert that saw fewer has no range that could be trusted
STATS = "amax, ema, delayed, or a percentile such as p99.9"
_EXPERT = re.compile(r"^(.*experts)\.(\d+)\.([\w.]+)$")
_PARTS = {"counts": "I64", "pieces": "F32", "channels": "F32", "tokens": "I64"}


@dataclass(frozen=True)
class Batch:
    """What one tensor adds: counts [BINS], the maximum of each channel, rows."""

    counts: I64
    channels: F32
    tokens: int


def batch(x: F32, axis: int = -1, tokens: int | None = None) -> Batch:
    """Counts and maxima of x, float32 and finite, its channels along ``axis``; ``tokens`` is the number of rows where
    that is not what the other axes hold."""
    size = np.abs(x)
    rows = np.moveaxis(size, axis, -1).reshape(-1, x.shape[axis])
    return Batch(histogram(size), rows.max(axis=0, initial=0), len(rows) if tokens is None else tokens)


def histogram(size: F32) -> I64:
    """Elements of each bin, of finite magnitudes float32."""
    bits = np.ascontiguousarray(size, np.float32).reshape(-1).view(np.int32)
    bins = np.clip(((bits + ((1 << SHIFT) - 1)) >> SHIFT) - FIRST, 0, BINS - 1)
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def edge(b: int) -> float:
    """The upper edge of bin b, which belongs to it."""
    return float(np.int32((b + FIRST) << SHIFT).view(np.float32))


@dataclass
class Range:
    """Magnitudes of one place; see the module docstring. ``counts`` int64 [BINS], ``pieces`` float32 [P], ``channels``
    float32 [C]."""

    counts: I64
    pieces: F32
    channels: F32
    tokens: int = 0

    @classmethod
    def empty(cls, channels: int, pieces: int) -> Range:
        return cls(np.zeros(BINS, np.int64), np.zeros(pieces, np.float32), np.zeros(channels, np.float32))

    def add(self, piece: int, seen: Batch) -> None:
        """Take in what a piece of text brought."""
        self.counts += seen.counts
        self.channels = np.maximum(self.channels, seen.channels)
        self.pieces[piece] = max(self.pieces[piece], seen.channels.max(initial=0))
        self.tokens += seen.tokens

    def merged(self, other: Range) -> Range:
        """This range and then the other, as one run over both texts gives it."""
        return Range(
            self.counts + other.counts, np.concatenate([self.pieces, other.pieces]),
            np.maximum(self.channels, other.channels), self.tokens + other.tokens,
        )  # fmt: skip

    @property
    def amax(self) -> float:
        return float(self.channels.max(initial=0))

    @property
    def elements(self) -> int:
        return int(self.counts.sum())

    def at(self, stat: str = "amax") -> float:
        """The magnitude that a scale is made for: ``amax``, ``ema``, ``delayed`` or a percentile ``pN``."""
        check_stat(stat)
        seen = self.pieces[self.pieces > 0].astype(np.float64)
        if stat == "amax" or not len(seen):
            return self.amax
        if stat == "delayed":
            return float(seen[-HISTORY:].max())
        if stat == "ema":
            mean = seen[0]
            for value in seen[1:]:
                mean += SMOOTHING * (value - mean)
            return float(np.float32(mean))
        return self.percentile(float(stat[1:]))

    def percentile(self, share: float) -> float:
        """The smallest edge that ``share`` percent of the elements do not pass, at most amax."""
        wanted = ceil(self.elements * share / 100)
        found = int(np.searchsorted(np.cumsum(self.counts), max(wanted, 1)))
        return min(edge(found), self.amax) if found < BINS - 1 else self.amax

    def beyond(self, limit: float) -> int:
        """Elements whose magnitude is larger than ``limit``, which is an edge."""
        b = (int(np.float32(limit).view(np.int32)) >> SHIFT) - FIRST
        assert edge(b) == limit, "the limit lies inside a bin"
        return int(self.counts[b + 1 :].sum())


def check_stat(stat: str) -> None:
    """UsageError for a statistic that does not exist."""
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", stat)
    if stat not in ("amax", "ema", "delayed") and not (match and 0 < float(match[1]) <= 100):
        raise UsageError("no such statistic", got=stat, wanted=STATS)


@dataclass(frozen=True)
class Text:
    """A text that was run: its name, SHA-256, tokens, pieces and the longest piece in tokens."""

    name: str
    sha256: str
    tokens: int
    pieces: int
    context: int


@dataclass
class Stats:
    """Calibration statistics of one model.

    ``inputs`` by the linear's name in the checkpoint; ``caches`` by the attention's path and then ``k``, ``v`` and
    ``q``, as they are after rotary embedding, their channels being heads; ``layer_of`` gives an attention's layer
    index; ``experts`` the tokens [E] that each expert of a layer saw, by the path of the experts.
    ``fingerprint`` is that of the very checkpoint, ``kin`` one that a quantized version of it has too.
    """

    model: str
    fingerprint: str
    kin: str
    dtype: str
    texts: tuple[Text, ...]
    inputs: dict[str, Range] = field(default_factory=dict)
    caches: dict[str, dict[str, Range]] = field(default_factory=dict)
    layer_of: dict[str, int] = field(default_factory=dict)
    experts: dict[str, I64] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    @property
    def starved(self) -> dict[str, list[int]]:
        """Experts that saw fewer than STARVED tokens, by the path of their layer's experts."""
        few = {path: np.flatnonzero(seen < STARVED).tolist() for path, seen in self.experts.items()}
        return {path: numbers for path, numbers in few.items() if numbers}

    def input_amax(self, stat: str = "amax") -> dict[str, float]:
        """The magnitude that each linear's static input scale is made for; 0 where nothing was seen.

        Of experts it is the largest of the layer's, for the same projection: engines keep one scale for all of them,
        and an expert that saw few tokens has none of its own to trust.
        """
        own = {name: seen.at(stat) for name, seen in self.inputs.items()}
        largest: dict[tuple[str, str], float] = {}
        places = {name: (match[1], match[3]) for name in own if (match := _EXPERT.match(name))}
        for name, place in places.items():
            largest[place] = max(largest.get(place, 0.0), own[name])
        return own | {name: largest[place] for name, place in places.items()}

    def cache_amax(self, attention: str, which: str, stat: str = "amax", heads: bool = False) -> F32:
        """amax of keys, values or queries of one attention: float32 [1], or [heads], where only ``amax`` is known."""
        if heads and stat != "amax":
            raise UsageError("scales of single heads are made from amax", got=stat, remedy="--stat amax")
        if which not in self.caches.get(attention, {}):
            raise UsageError(
                f"these statistics have no {which} of {attention}", where=self.model,
                remedy="calibrate this model: `narrowcast calibrate`",
            )  # fmt: skip
        seen = self.caches[attention][which]
        return seen.channels.copy() if heads else np.array([seen.at(stat)], np.float32)

    def refuse_other(self, fingerprint: str, where: object) -> None:
        """UsageError where these are statistics of another checkpoint."""
        if self.fingerprint != fingerprint:
            raise UsageError(
                "these are the statistics of another model", where=where, got=f"statistics of {self.model}",
                remedy=f"`narrowcast calibrate {where} -o stats.safetensors` makes them for this one",
            )  # fmt: skip


def scale_of(amax: F32, reach: float) -> F32:
    """amax / reach in fp32; 1 where amax is zero."""
    return np.where(amax > 0, amax / np.float32(reach), np.float32(1)).astype(np.float32)


def merge(a: Stats, b: Stats) -> Stats:
    """Both texts' statistics in one. UsageError where the models, or the dtypes they ran in, differ."""
    b.refuse_other(a.fingerprint, a.model)
    if a.dtype != b.dtype:
        raise UsageError("the two ran in different dtypes", got=f"{a.dtype} and {b.dtype}")
    caches = {
        path: {which: seen.merged(b.caches[path][which]) for which, seen in both.items()}
        for path, both in a.caches.items()
    }
    return Stats(
        a.model, a.fingerprint, a.kin, a.dtype, a.texts + b.texts,
        {name: seen.merged(b.inputs[name]) for name, seen in a.inputs.items()}, caches, dict(a.layer_of),
        {path: seen + b.experts[path] for path, seen in a.experts.items()},
    )  # fmt: skip


def arrays(stats: Stats) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors of a file, and which name's input is stored under which other name."""
    found: dict[str, NDArray[Any]] = {}
    same: dict[str, str] = {}
    first: dict[bytes, str] = {}
    for name, seen in stats.inputs.items():
        parts = _arrays(seen)
        owner = first.setdefault(b"".join(part.tobytes() for part in parts.values()), name)
        if owner != name:
            same[name] = owner
        else:
            found |= {f"{name}.input.{part}": array for part, array in parts.items()}
    for path, both in stats.caches.items():
        for which, seen in both.items():
            found |= {f"{path}.{which}.{part}": array for part, array in _arrays(seen).items()}
    return found | {f"{path}.chosen": seen for path, seen in stats.experts.items()}, same


def _arrays(seen: Range) -> dict[str, NDArray[Any]]:
    return {
        "counts": seen.counts, "pieces": seen.pieces, "channels": seen.channels,
        "tokens": np.array([seen.tokens], np.int64),
    }  # fmt: skip


def write(stats: Stats, path: Path, more: Mapping[str, NDArray[Any]] | None = None) -> None:
    """One file, under its name once it is whole. ``more`` are tensors beside the statistics (of a run that goes on).

    UsageError where the file exists, StorageError where the disk refuses.
    """
    content, same = arrays(stats)
    content |= more or {}
    metadata = {
        "format": SCHEMA, "narrowcast": __version__, "model": stats.model, "fingerprint": stats.fingerprint,
        "kin": stats.kin, "dtype": stats.dtype, "texts": json.dumps([vars(text) for text in stats.texts]),
        "same": json.dumps(same), "layers": json.dumps(stats.layer_of), "names": json.dumps(list(stats.inputs)),
    }  # fmt: skip
    specs = [Spec(name, DTYPES[_dtype(array)], array.shape) for name, array in content.items()]
    with Writer(path, specs, metadata) as writer:
        for name, array in content.items():
            writer.write(name, np.ascontiguousarray(array))
        writer.finish()


def _dtype(array: NDArray[Any]) -> str:
    return {"i8": "I64", "f4": "F32", "u2": "BF16", "f2": "F16"}[array.dtype.str[1:]]


def read(path: str | Path) -> Stats:
    """Statistics from a file; InputError where it holds none, UsageError where there is no such file."""
    if not Path(path).is_file():
        raise UsageError("no such file of statistics", got=path, remedy="`narrowcast calibrate` makes one")
    with Reader(path) as reader:
        said = reader.metadata
        if said.get("format") != SCHEMA:
            raise InputError(
                "this file holds no calibration statistics", where=path, got=said.get("format"), wanted=SCHEMA,
                remedy="`narrowcast calibrate MODEL -o stats.safetensors` makes them",
            )  # fmt: skip
        try:
            return _read(reader, said)
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                "the file of statistics is damaged", where=path, got=str(error) or type(error).__name__,
                remedy="calibrate again",
            ) from None  # fmt: skip


def _read(reader: Reader, said: Mapping[str, str]) -> Stats:
    def seen(stem: str) -> Range:
        counts, pieces, channels, tokens = (np.array(reader.array(f"{stem}.{part}")) for part in _PARTS)
        if counts.shape != (BINS,):
            raise ValueError(f"{stem}.counts has shape {list(counts.shape)}")
        return Range(counts, pieces, channels, int(tokens[0]))

    same, layers = json.loads(said["same"]), json.loads(said["layers"])
    stats = Stats(
        said["model"], said["fingerprint"], said["kin"], said["dtype"],
        tuple(Text(**text) for text in json.loads(said["texts"])), layer_of=layers,
    )  # fmt: skip
    for name in json.loads(said["names"]):
        stats.inputs[name] = seen(f"{same.get(name, name)}.input")
    for path in layers:
        stats.caches[path] = {
            which: seen(f"{path}.{which}") for which in "kvq" if f"{path}.{which}.counts" in reader.entries
        }
    chosen = [name for name in reader.entries if name.endswith(".chosen")]
    stats.experts = {name.removesuffix(".chosen"): np.array(reader.array(name)) for name in chosen}
    return stats
