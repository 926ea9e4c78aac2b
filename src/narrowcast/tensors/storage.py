"""The scheme of what lies in a file: found by what is stored, since a file does not say by which rule it was made.

Two schemes store alike when element, scale formats, tiles, direction and zero points agree. Rules, spans and
arithmetic are how a quantizer got there; a decoder does not need them.

    fp8 codes, F32 [⌈N/64⌉, ⌈K/64⌉]         →  stored_scheme(E4M3FN, (64, 64), FP32), called fp8_block64
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0, FP32, Format, Kind
from narrowcast.tensors.schemes import Scale, Scheme, Tile, schemes


def same_storage(a: Scheme, b: Scheme) -> bool:
    """Whether the bytes of one scheme mean the same under the other."""
    return _stored(a) == _stored(b)


def _stored(scheme: Scheme) -> tuple[object, ...]:
    levels = tuple((level.format, level.tile, level.divides) for level in scheme.scales)
    return scheme.element, levels, scheme.zero


@cache  # thousands of layers are stored alike
def stored_scheme(
    element: Format,
    tile: Tile,
    scale: Format,
    *,
    zero: Format | None = None,
    outer: bool = False,
    divides: bool = False,
) -> Scheme:
    """The scheme with these stored facts: a row of the table where there is one (with this scale format in place of
    its own float one), else a scheme of its own with a systematic name.

    ``outer`` adds a per-tensor fp32 scale, which ``divides`` when it is stored as a divisor that has no exact inverse.
    """
    wanted = Scheme("", element, _levels(element, tile, scale, outer, divides), zero)
    for row in schemes.values():
        if same_storage(row, wanted):
            return row
    for row in schemes.values():
        if row.inner.format is not E8M0 and same_storage(row.with_scale_format(scale), wanted):
            return row.with_scale_format(scale)
    if divides:
        beside = stored_scheme(element, tile, scale, zero=zero, outer=True)
        return replace(wanted, name=f"{beside.name}_divisor")
    return replace(wanted, name=_name(wanted))


def _levels(element: Format, tile: Tile, scale: Format, outer: bool, divides: bool) -> tuple[Scale, ...]:
    # A quantizer that is given such a scheme uses the full range of integers, as the rows of the table do.
    span = float(2**element.bits - 1) / 2 if element.kind is Kind.INT and element.signed else None
    rule = "amax" if scale is not E8M0 else "bump(1.75)" if element is E2M1 else "rceil"
    if element.kind is Kind.INT and not element.signed:
        rule, span = "minmax", element.max
    inner = Scale(scale, tile, rule, span)
    return (inner, Scale(FP32, (0, 0), "amax" if divides else "pow2", None, divides)) if outer else (inner,)


def _name(scheme: Scheme) -> str:
    rows, cols = scheme.inner.tile
    element = "fp8" if scheme.element is E4M3FN else scheme.element.name
    where = {(0, 0): "tensor", (1, 0): "channel"}.get((rows, cols)) or (
        f"g{cols}" if rows == 1 else f"block{rows}x{cols}"
    )
    if rows == cols and rows:
        where = f"block{rows}"
    return f"{element}_{where}" + ("_ue8m0" if scheme.inner.format is E8M0 else "")
