"""One outer scale, and one static input scale, for layers that engines load as one.

    a · s = c · s'        s' = s · a / c        c = max over the siblings of a       (divisors: min)

Engines keep one outer scale for q, k and v, or for gate and up. Codes stay; block scales s become s'. Where every
s' is a number of the scale's format and both products are the same in fp32, no decoded bit changes, as with the
ratio 4 of outer scales that are powers of two apart; else s' is rounded to nearest and the loss is measured. Where
that is more than the format's own, one of the outer scales is wrong, and which one nobody can tell: nothing is moved.
Input scales become the largest, which is what engines take for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, log10

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import Array, Piece
from narrowcast.jobs.coded import Coded, folded
from narrowcast.jobs.matching import Held, held
from narrowcast.jobs.stream import chunks
from narrowcast.kernels import Rows, choose
from narrowcast.model.fused import fused_groups
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import E4M3FN, FP32
from narrowcast.repair.draft import Draft, Mended
from narrowcast.tensors.scaling import element_divisor, store_scale
from narrowcast.tensors.schemes import Scheme

Group = Sequence[tuple[Held, Coded]]
# dB: a rounded scale is off by 2^-4 at most, which keeps 24; what keeps less lost its small blocks, and FP4 itself
# keeps 20 of the original.
LEAST = 20.0


def fused_outer(draft: Draft) -> Iterator[Mended]:
    """Give fused siblings one outer scale; see the module docstring."""
    for group in _groups(draft):
        two = [(one, coded) for one, coded in group if len(coded.how.scheme.scales) == 2]
        if len(two) == len(group) and len({coded.how.scheme.name for _, coded in two}) == 1:
            yield from _share(draft, two)
        yield from _inputs(draft, group)


def _groups(draft: Draft) -> Iterator[Group]:
    """Quantized siblings, alone in their tensors."""
    if draft.opened is None:
        return
    found = {
        name: (one, one.coded)
        for name, one in held(draft.opened).found.items()
        if one.coded is not None and one.coded.place.experts is None
    }
    for names in fused_groups(found):
        if len(names) > 1:
            yield [found[name] for name in names]


def _share(draft: Draft, group: Group) -> Iterator[Mended]:
    source = draft.checkpoint
    outers = [coded.outer(source) for _, coded in group]
    scheme = group[0][1].how.scheme
    usable = [value for value in outers if value is not None and np.isfinite(value) and value > 0]
    if len(usable) != len(group) or len(set(usable)) == 1 or scheme.inner.format is not E4M3FN:
        return
    divides = scheme.scales[-1].divides
    common = min(usable) if divides else max(usable)
    largest = group[usable.index(common)][1]
    stored = np.array(source.array(_tensor(largest, "outer")))
    moved = []
    for (one, coded), own in zip(group, usable, strict=True):
        if own == common:
            continue
        codes = _moved(scheme, common / own if divides else own / common)
        exact = _same_products(scheme, own, common, codes)[_used(coded, source)].all()
        sqnr = inf if exact else _loss(coded, source, codes, common)
        if sqnr < LEAST:
            draft.unmended.append(
                f"{one.name}: under its siblings' outer scale {common:.6g} in the place of {own:.6g} it would keep "
                f"{sqnr:.1f} dB: one of them is wrong, or they differ too much; quantize them again from the parent"
            )
            return
        moved.append((one, coded, own, codes, sqnr))
    for one, coded, own, codes, sqnr in moved:
        scales = _tensor(coded, "scales")
        draft.rewrite(scales, lambda name=scales, codes=codes: codes[source.array(name)])  # type: ignore[misc]
        draft.rewrite(_tensor(coded, "outer"), lambda: stored)
        how = "no decoded value changes" if sqnr == inf else f"block scales rounded, {sqnr:.1f} dB"
        yield Mended(
            "fused_outer",
            f"outer scale {own:.6g} is now its siblings' {common:.6g}: {how}",
            (one.name,),
            sqnr,
        )


def _tensor(coded: Coded, piece: Piece) -> str:
    part = coded.how.part(piece)
    assert part is not None
    return coded.place.stem + part.suffix


def _moved(scheme: Scheme, ratio: float) -> NDArray[np.uint8]:
    """The code that every code of a block scale becomes, at least the smallest for one that was not zero."""
    values = decode_table(scheme.inner.format).astype(np.float64) * ratio
    codes = store_scale(np.where(np.isfinite(values), values, 0).astype(np.float32), scheme.inner.format)
    codes = np.where((codes == 0) & (values > 0), 1, codes)
    return np.where(np.isfinite(values), codes, np.arange(256)).astype(np.uint8)


def _used(coded: Coded, source: object) -> NDArray[np.bool_]:
    scales, _ = coded.how.scales(source, coded.place, coded.shape, 0, coded.shape[0])  # type: ignore[arg-type]
    return np.bincount(scales.reshape(-1), minlength=256) > 0


def _same_products(scheme: Scheme, own: float, common: float, codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """For every code of a block scale, whether the fp32 product with its outer scale stays what it was."""
    every = np.arange(256, dtype=np.uint8)[None, :]
    with np.errstate(all="ignore"):
        before, after = (
            element_divisor(of, scheme, np.full((1, 1), value, np.float32))
            for of, value in ((every, own), (codes[None, :], common))
        )
        found: NDArray[np.bool_] = (before == after)[0]
    return found


def _loss(coded: Coded, source: object, codes: NDArray[np.uint8], common: float) -> float:
    """dB of the values as they were over what changes."""
    n, k = coded.shape
    signal = noise = 0.0
    for i, j in chunks(n, 4 * k, coded.how.row_multiple, coded.chunk_bytes):
        rows = coded.rows(source, i, j)  # type: ignore[arg-type]
        before = _values(coded, rows, coded.outer(source))  # type: ignore[arg-type]
        after = _values(coded, replace(rows, scales=codes[rows.scales]), common)
        signal += float(np.square(before, dtype=np.float64).sum())
        noise += float(np.square(before.astype(np.float64) - after).sum())
    return 10 * log10(signal / noise) if signal and noise else inf


def _values(coded: Coded, rows: Rows, outer: float | None) -> Array:
    how = coded.how
    rows, scheme, outer = folded(rows, how.scheme, outer)
    backend = choose(scheme, FP32, how.packing).backend
    return backend.dequantize(rows, scheme, how.packing, coded.shape[1], FP32, outer)


def _inputs(draft: Draft, group: Group) -> Iterator[Mended]:
    """Static input scales of siblings: the largest for all, where all have one."""
    source, found = draft.checkpoint, []
    for one, coded in group:
        part = coded.how.part("input")
        if part is None or coded.place.stem + part.suffix not in source.entries:
            return
        value = coded.how.static(source, coded.place, coded.shape, "input")
        found.append((float(value.reshape(-1)[0]), coded.place.stem + part.suffix, one.name))
    values = [value for value, *_ in found]
    if not found or len(set(values)) == 1 or not all(np.isfinite(v) and v > 0 for v in values):
        return
    largest, tensor, _ = max(found)
    stored = np.array(source.array(tensor))
    others = [(name, module) for value, name, module in found if value != largest]
    for name, _ in others:
        draft.rewrite(name, lambda: stored)
    yield Mended(
        "fused_outer", f"input scale is now {largest:.6g}, the largest of its siblings', which engines take for all",
        tuple(module for _, module in others),
    )  # fmt: skip
