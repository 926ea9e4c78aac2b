"""Why two versions of a matrix differ by more than their formats can cause: known mistakes, each tried and measured.

    a mistake is found when undoing it brings the SQNR of a sample up by 6 dB, to 9 dB or more; the best one counts

Rounding to m mantissa bits costs about 6.02 (m + 1) + 7.5 dB, to b bits of integers 6.02 b - 6 dB; a tensor 3 dB below
the coarser of its two formats is looked into, on its first rows only. Each mistake is one function that yields
what the two sides would be without it. It undoes values where it can, so that it is seen in a decoded copy as well, and
codes or scales where it must.

Left out: two mistakes at once, and which side made it. A is the reference, so B is said to have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, lcm, log10

import numpy as np
from numpy.typing import NDArray

from narrowcast.jobs.coded import in_order
from narrowcast.jobs.matching import Held
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.formats import E4M3FN, Format, Kind, formats
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import element_divisor, load_scale, spread

F = NDArray[np.floating]
GAIN, ENOUGH, SLACK = 6.0, 9.0, 3.0  # dB; enough is what 2-bit integers keep
SAMPLE = 1 << 18  # elements: some milliseconds for each mistake
ROWS = 512
NEAR = 2.0**-6  # of a ratio that least squares gives, on a sample that was rounded
HEADS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)  # rows of an attention head
E4M3 = (E4M3FN, formats["e4m3fnuz"])
_QUERY = re.compile(r"(^|\.)(q|k|query|key|wq|wk)(_b)?(_proj)?$")
_GATED = re.compile(r"(gate|up|gate_up|w1|w3)(_proj)?$")
_SIBLING = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


@dataclass(frozen=True)
class Diagnosis:
    """A mistake: its name, what it is and how to mend it in words, and dB of the sample as it is and without it."""

    name: str
    said: str
    remedy: str
    before: float
    after: float

    def to_json(self) -> dict[str, str | float]:
        return vars(self)


@dataclass(frozen=True)
class Sample:
    """The first rows of one side: values [n, K] in the model's order, and what is stored of them (None: floats)."""

    held: Held
    rows: int

    @cached_property
    def values(self) -> F:
        return self.held.values(0, self.rows)

    @cached_property
    def q(self) -> QTensor | None:
        coded = self.held.coded
        if coded is None:
            return None
        source, how = self.held.checkpoint, coded.how
        return qtensor(
            coded.rows(source, 0, self.rows), how.scheme, how.packing, coded.shape[1], coded.outer(source)
        )

    @cached_property
    def grid(self) -> NDArray[np.generic]:
        """The innermost scales of the whole matrix, as stored."""
        coded = self.held.coded
        assert coded is not None
        step = max(SAMPLE // coded.shape[1] // coded.how.row_multiple, 1) * coded.how.row_multiple
        parts = [
            coded.rows(self.held.checkpoint, i, min(i + step, coded.shape[0])).scales
            for i in range(0, coded.shape[0], step)
        ]
        return np.concatenate(parts) if coded.how.scheme.inner.tile[0] else parts[0]

    def decoded(self, elements: F | None = None, scale: F | None = None) -> F:
        """Values from other elements, or under other products of scales, one for each innermost tile."""
        assert self.q is not None
        scale = _products(self.q) if scale is None else scale
        elements = self.q.elements() if elements is None else elements
        values = elements * spread(scale, self.q.scheme.inner.tile, self.q.shape)
        order, factors = self.held.columns()
        values = values if factors is None else values * factors
        return values if order is None else in_order(values, order)

    def with_scales(self, stored: NDArray[np.generic]) -> F:
        """Values under other innermost scales, as stored."""
        assert self.q is not None
        return self.decoded(scale=element_divisor(stored, self.q.scheme, _outer(self.q)))


def _outer(q: QTensor) -> F | None:
    return q.scale_values(1) if len(q.scales) == 2 else None


def _products(q: QTensor) -> F:
    return element_divisor(q.scales[0], q.scheme, _outer(q))


class Case:
    """One tensor of both sides, with the way to others of the same model."""

    def __init__(
        self, a: Held, b: Held, find_a: Callable[[str], Held | None], find_b: Callable[[str], Held | None]
    ) -> None:
        multiple = lcm(a.row_multiple, b.row_multiple)
        n, k = a.source.shape
        rows = max(min(SAMPLE // max(k, 1), ROWS) // multiple, 1) * multiple
        self.name, self.shape, self.shapes = a.name, (n, k), (a.shape, b.shape)
        self.a, self.b = Sample(a, min(rows, n)), Sample(b, min(rows, b.source.shape[0]))
        self.find_a, self.find_b = find_a, find_b

    def ways(self) -> tuple[tuple[Sample, Callable[..., Guess]], ...]:
        """Each side, with how to make a guess of values that are its own without the mistake."""
        return (
            (self.b, lambda values, said="": Guess(self.a.values, values, said.format("A", "B"))),
            (self.a, lambda values, said="": Guess(values, self.b.values, said.format("B", "A"))),
        )


@dataclass(frozen=True)
class Guess:
    """Values of A and of B as they would be without a mistake, with more words about it."""

    a: F
    b: F
    said: str = ""


@dataclass(frozen=True)
class Mistake:
    """A row of the table: ``guess`` tries it, and says nothing where it cannot have happened."""

    name: str
    said: str
    remedy: str
    guess: Callable[[Case], Iterator[Guess]]


def suspicious(sqnr: float, a: Held, b: Held) -> bool:
    """Whether a loss is more than the formats of both sides cause."""
    return sqnr < min(typical(a.element), typical(b.element)) - SLACK


def typical(element: Format) -> float:
    """dB that rounding bell-shaped weights to a format keeps; see the module docstring."""
    if element.kind is Kind.INT or element.kind is Kind.TABLE:
        return 6.02 * element.bits - 6
    return 6.02 * (element.mantissa_bits + 1) + 7.5


def diagnose(case: Case) -> Diagnosis | None:
    """The mistake that explains the difference best, or None."""
    if case.shapes[0] != case.shapes[1]:
        return _turned(case)
    best: Diagnosis | None = None
    with np.errstate(all="ignore"):  # what a mistaken scale makes of values may be anything
        before = sqnr(case.a.values, case.b.values)
        if before == inf:
            return None  # what differs lies beyond the sample
        for mistake in MISTAKES:
            for guess in mistake.guess(case):
                after = sqnr(guess.a, guess.b)
                if after < max(before + GAIN, ENOUGH) or (
                    best is not None and not after > best.after + SLACK
                ):
                    continue
                best = Diagnosis(mistake.name, mistake.said + guess.said, mistake.remedy, before, after)
            if best is not None and not suspicious(best.after, case.a.held, case.b.held):
                break  # nothing is left to explain
    return best


def sqnr(a: F, b: F) -> float:
    """dB over elements that are finite on both sides."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    signal, noise = float(np.square(x).sum()), float(np.square(x - y).sum())
    if not isfinite(signal + noise):
        finite = np.isfinite(x) & np.isfinite(y)
        signal, noise = float(np.square(x[finite]).sum()), float(np.square((x - y)[finite]).sum())
    return inf if not noise else 10 * log10(signal / noise) if signal else -inf


def _turned(case: Case) -> Diagnosis | None:
    """A matrix and its transpose, by their shapes and by the corner that both samples have."""
    a, b = case.shapes
    size = min(case.a.rows, case.b.rows)
    if len(a) != 2 or a != b[::-1] or not size:
        return None
    after = sqnr(case.a.values[:size, :size], case.b.values[:size, :size].T)
    return Diagnosis("transposed", "B is A's transpose", TRANSPOSED, -inf, after) if after >= ENOUGH else None


def swapped_neighbours(case: Case) -> Iterator[Guess]:
    """Two 4-bit codes in a byte, read or written high nibble first: columns 2i and 2i + 1 change places."""
    k = case.shape[1]
    if k % 2 == 0 and k and 4 in (case.a.held.element.bits, case.b.held.element.bits):
        b = case.b.values
        yield Guess(case.a.values, b.reshape(len(b), k // 2, 2)[:, :, ::-1].reshape(b.shape))


def shifted_zero(case: Case) -> Iterator[Guess]:
    """Zero points off by one, as when GPTQ's v1 files (which store zero - 1) and v2 files (which store zero) are
    taken for each other: every value of a group is off by its scale. Codes of zero points wrap: GPTQ stores a zero of
    0 as the largest code."""
    for side, guess in case.ways():
        q = side.q
        if q is None or q.scheme.element.kind is not Kind.INT:
            continue
        for step in (-1, 1):
            yield guess(side.decoded(q.elements() + np.float32(step)))
            if q.zero is not None and q.scheme.zero is not None:
                wrapped = (q.zero.astype(np.int16) + step) % (1 << q.scheme.zero.bits)
                yield guess(side.decoded(replace(q, zero=wrapped.astype(np.uint8)).elements()))


def dropped_scale(case: Case) -> Iterator[Guess]:
    """Codes taken as values: all scales left out on one side, or the innermost ones, or the outer one."""
    for side, guess in case.ways():
        if side.q is None:
            continue
        ones, said = np.ones_like(_products(side.q)), "{0} is what {1}'s codes are without "
        yield guess(side.decoded(scale=ones), said + "any scale")
        if _outer(side.q) is not None:
            yield guess(side.values / _factor(side.q), said + "the outer scale")
            yield guess(side.decoded(scale=ones * _factor(side.q)), said + "the innermost scales")


def _factor(q: QTensor) -> np.float32:
    """The outer scale as a multiplier."""
    outer = np.float32(q.scale_values(1).reshape(-1)[0])
    return np.float32(1) / outer if q.scheme.scales[1].divides else outer


def inverted_scale(case: Case) -> Iterator[Guess]:
    """A multiplier stored or read as a divisor, or the reverse: the outer scale, or the innermost ones. Of an outer
    scale the ratio of the values is constant, its square."""
    for side, guess in case.ways():
        if side.q is None:
            continue
        inner, product = load_scale(side.q.scales[0], side.q.scheme.inner.format), _products(side.q)
        yield guess(side.decoded(scale=product / inner / inner), ", the innermost one")
        if _outer(side.q) is not None:
            yield guess(side.decoded(scale=inner / _factor(side.q)), ", the outer one")


def shifted_scales(case: Case) -> Iterator[Guess]:
    """Scales that are off by one position: along columns, along rows, or in the order they lie in the file. What
    comes in at an end is not known, so the first and last tiles of rows do not count."""
    for side, guess in case.ways():
        if side.q is None or side.q.scales[0].size < 2:
            continue
        stored = side.q.scales[0]
        height = side.q.scheme.inner.tile[0]
        inside = slice(height, -height) if len(stored) > 2 else slice(None)
        for axis in (None, 0, 1):
            for step in (-1, 1):
                if axis is None or stored.shape[axis] > 1:
                    made = guess(side.with_scales(np.roll(stored, step, axis)))
                    yield Guess(made.a[inside], made.b[inside])


def turned_scales(case: Case) -> Iterator[Guess]:
    """The grid of scales in the wrong orientation: [K tiles, N tiles] in memory, taken for [N tiles, K tiles]."""
    for side, guess in case.ways():
        if side.q is not None and min(side.grid.shape) > 1:
            rows, columns = side.grid.shape
            yield guess(side.with_scales(side.grid.reshape(columns, rows).T[: len(side.q.scales[0])]))


def doubled_fnuz(case: Case) -> Iterator[Guess]:
    """E4M3FN bytes read as E4M3FNUZ, or the reverse: the bias differs by one, so values by a factor of 2, and 0x80 is
    -0 in one and NaN in the other. The same goes for scales that are E4M3."""
    found = {case.a.held.element, case.b.held.element}
    found |= {side.q.scheme.inner.format for side in (case.a, case.b) if side.q is not None}
    if found & set(E4M3):
        for factor, said in ((2, ": A is twice B"), (0.5, ": A is half of B")):
            yield Guess(case.a.values, case.b.values * np.float32(factor), said)


def constant_factor(case: Case) -> Iterator[Guess]:
    """One factor for all values, by least squares: Σ ab / Σ b²."""
    factor = _ratio(case.a.values, case.b.values)
    if factor is not None:
        said = f": A is {_spelled(factor)} times B"
        yield Guess(case.a.values, case.b.values * np.float32(factor), said)


def _ratio(a: F, b: F) -> float | None:
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = (np.where(finite, side, 0).astype(np.float64) for side in (a, b))
    energy = float(np.square(y).sum())
    factor = float((x * y).sum()) / energy if energy else 0.0
    return factor if factor and isfinite(factor) else None


def _spelled(factor: float) -> str:
    """A factor; as a power of two where it is one but for rounding."""
    power = round(log10(abs(factor)) / log10(2))
    if power and abs(abs(factor) / 2.0**power - 1) < NEAR:
        return f"{'-' if factor < 0 else ''}2^{power}"
    return f"{factor:.4g}"


def scaled_columns(case: Case) -> Iterator[Guess]:
    """One factor for each column: smoothing (AWQ, SmoothQuant) that the layer before, or a vector beside the weight,
    takes back."""
    a, b = (side.values.astype(np.float64) for side in (case.a, case.b))
    if len(a) < 16 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return
    energy = np.square(b).sum(axis=0)
    yield Guess(a, b * ((a * b).sum(axis=0) / np.where(energy, energy, 1)))


def transposed(case: Case) -> Iterator[Guess]:
    """A square matrix in the other orientation, which its shape does not tell."""
    if case.shape[0] == case.shape[1]:
        size = case.a.rows
        yield Guess(case.a.values[:, :size], case.b.values[:, :size].T)


def rotary_order(case: Case) -> Iterator[Guess]:
    """Rows of q or k in the other rotary order: pairs (0, 1), (2, 3) ... of a head, as in GGUF and the original
    Llama, or its halves (0, d/2), (1, d/2 + 1) ..., as in transformers."""
    n = case.shape[0]
    if not _QUERY.search(case.name):
        return
    a, b = (side.held.values(0, min(n, HEADS[-1]))[:, :ROWS] for side in (case.a, case.b))
    for size in HEADS:
        if n % size or size > len(a):
            continue
        count = len(a) // size
        x, y = (side[: count * size].reshape(count, size, -1) for side in (a, b))
        for shape in ((size // 2, 2), (2, size // 2)):
            turned = y.reshape(count, *shape, -1).swapaxes(1, 2).reshape(y.shape)
            yield Guess(x, turned, f", {size} rows a head")


def swapped_halves(case: Case) -> Iterator[Guess]:
    """Two projections fused along the rows in the other order: up before gate."""
    n = case.shape[0]
    rows = min(case.a.rows, n // 2)
    if n % 2 == 0 and rows:
        yield Guess(case.a.held.values(0, rows), case.b.held.values(n // 2, n // 2 + rows))


def swapped_siblings(case: Case) -> Iterator[Guess]:
    """gate where up should be: A's gate is B's up."""
    path, _, leaf = case.name.rpartition(".")
    other = case.find_b(f"{path}.{_SIBLING[leaf]}") if leaf in _SIBLING else None
    if other is not None and other.shape == case.shapes[0]:
        yield Guess(case.a.values, other.values(0, case.a.rows))


def interleaved(case: Case) -> Iterator[Guess]:
    """Gate and up interleaved row by row and read as halves, or the reverse. Every second row of one side is then
    the other's from the beginning (gate) or from the middle (up) on."""
    if not _GATED.search(case.name) or case.shape[0] < 4:
        return
    middle = case.shape[0] // 2
    rows = min(case.a.rows, middle) // 2
    for first, start in ((0, 0), (1, middle)):
        for x, y, turn in ((case.a, case.b, False), (case.b, case.a, True)):
            own, other = x.values[first : 2 * rows : 2], y.held.values(start, start + rows)
            yield Guess(other, own) if turn else Guess(own, other)


TRANSPOSED = (
    "transpose it, or say how the file stores it: experts are [K, N] in some families, GPT-2's layers too"
)
MISTAKES = (
    Mistake(
        "swapped neighbours", "B's neighbouring columns are swapped, as two 4-bit codes of a byte are when the high "
        "one is taken for the first", "unpack the low nibble first", swapped_neighbours,
    ),
    Mistake(
        "zero point off by one", "B's zero points are off by one", "one side is GPTQ v1, which stores zero - 1, and is "
        "labelled v2, or the reverse: correct checkpoint_format", shifted_zero,
    ),
    Mistake(
        "scale left out", "", "multiply by the scale that lies beside the codes", dropped_scale,
    ),
    Mistake(
        "scale inverted", "B's scale is a divisor where A's is a multiplier", "store its reciprocal: ModelOpt's "
        "weight_scale_2 multiplies, compressed-tensors' weight_global_scale divides", inverted_scale,
    ),
    Mistake(
        "E4M3FN read as E4M3FNUZ", "values differ by a factor of 2", "look for a scale that was doubled or halved; "
        "where every layer is so, E4M3 bytes (bias 7) were read as E4M3FNUZ (bias 8) or the reverse: double the scale "
        "where codes become E4M3FNUZ, and map 0x80 to 0", doubled_fnuz,
    ),
    Mistake(
        "scaled by a constant", "values differ by one factor", "look for a scale that was applied twice, or not at "
        "all", constant_factor,
    ),
    Mistake(
        "scales off by one", "B's scales are off by one position", "look for an offset of one scale where they are "
        "read", shifted_scales,
    ),
    Mistake(
        "scales transposed", "B's grid of scales is transposed", "store scales as the codes lie, a row of them for "
        "each tile of rows", turned_scales,
    ),
    Mistake("transposed", "B is A's transpose", TRANSPOSED, transposed),
    Mistake(
        "rotary order", "B's rows are in the other rotary order", "reorder the rows of q and k, or set the rotary "
        "style that goes with them", rotary_order,
    ),
    Mistake(
        "halves swapped", "B's rows begin with A's second half", "fuse gate before up", swapped_halves,
    ),
    Mistake("gate and up swapped", "B has gate and up in each other's place", "rename them", swapped_siblings),
    Mistake(
        "gate and up interleaved", "one side has the rows of gate and up interleaved, the other in halves",
        "split by the family's own order: gpt-oss interleaves, others have halves", interleaved,
    ),
    Mistake(
        "columns scaled", "B's columns each have a factor of their own", "compare what the layer computes: the "
        "factors are in the norm before it, or in a vector beside the weight", scaled_columns,
    ),
)  # fmt: skip
