"""Quantizing one element at a time: the definition in plain loops over float32 scalars and exact fractions.

Independent of the arrays under test: tiles are found by integer division of indices, the stored scale and the code
come from fractions_oracle.py, and only the three float32 roundings that the definition names are float32.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.tensors.schemes import Scheme
from reference.fractions_oracle import LAYOUTS, Layout, encode, floor_log2

Index = tuple[int, ...]
F = np.float32


def tile_of(index: Index, shape: Index, tile: tuple[int, int]) -> Index:
    """The tile that an element belongs to, by integer division; 0 is a whole axis."""
    *leading, i, j = index
    rows, cols = tile[0] or shape[-2], tile[1] or shape[-1]
    return (*leading, i // rows, j // cols)


def over_tiles(x: NDArray[Any], tile: tuple[int, int], what: Callable[[Any, Any], Any]) -> dict[Index, Any]:
    """``what`` folded over the elements of every tile, in index order."""
    found: dict[Index, Any] = {}
    for index in itertools.product(*map(range, x.shape)):
        at = tile_of(index, x.shape, tile)
        found[at] = x[index] if at not in found else what(found[at], x[index])
    return found


def power_of_two(amax: float, rule: str, layout: Layout) -> int:
    """The E8M0 byte of a nonzero tile, by comparing fractions."""
    exact, top = Fraction(amax), layout.highest
    emax, floor_ = floor_log2(top), floor_log2(exact)
    mantissa = exact / Fraction(2) ** floor_
    if rule == "rceil":
        # by its meaning: the smallest power of two under which amax does not exceed the largest value
        exponent = next(e for e in range(floor_ - emax - 2, 200) if exact <= top * Fraction(2) ** e)
    else:
        reached = {"floor": False, "ceil_log2": mantissa > 1}
        if rule == "even":
            top_binade = Fraction(2) ** emax
            reached["even"] = mantissa >= 2 - layout.quantum(top_binade) / top_binade / 2
        if rule.startswith("bump("):
            reached[rule] = mantissa >= Fraction(rule[5:-1])
        exponent = floor_ - emax + reached[rule]
    return min(max(exponent + 127, 0), 254)


def stored_value(code: int, name: str) -> np.float32:
    meaning = LAYOUTS[name].decode(code)
    assert isinstance(meaning, Fraction)
    return F(float(meaning))


def mantissa_scale(value: np.float32, name: str) -> tuple[Any, np.float32]:
    """A positive float32 scale as stored (fp32 value or code), never zero, never subnormal in fp32; and its value."""
    if name in ("fp32", "bf16"):
        value = max(value, F(2.0**-126))
    if name == "fp32":
        return value, value
    code = max(encode(LAYOUTS[name], float(value), "nearest_even", "saturate").code, 1)
    return code, stored_value(code, name)


def outer_power(amax: float) -> np.float32:
    """The smallest power of two ≥ amax / 2688, from below 2^-117 raised to it."""
    if amax == 0:
        return F(1)
    exponent = min(e for e in range(-200, 140) if Fraction(amax) <= 2688 * Fraction(2) ** e)
    return F(2.0 ** max(exponent, -117))


def quantize_by_loops(x: NDArray[np.float32], scheme: Scheme) -> dict[str, Any]:
    """Codes, stored scales, zero points and decoded values of x under a scheme of the default arithmetic."""
    tile, name, layout = scheme.inner.tile, scheme.inner.format.name, LAYOUTS.get(scheme.element.name)
    magnitude = over_tiles(np.abs(x), tile, max)
    high = over_tiles(np.maximum(x, 0), tile, max)
    low = over_tiles(np.minimum(x, 0), tile, min)
    outers = {k: outer_power(float(v)) for k, v in over_tiles(np.abs(x), (0, 0), max).items()}
    scales: dict[Index, Any] = {}
    values: dict[Index, np.float32] = {}
    zeros: dict[Index, int] = defaultdict(int)
    for at, amax in magnitude.items():
        outer = outers[(*at[:-2], 0, 0)] if len(scheme.scales) == 2 else F(1)
        span = F(scheme.inner.span or scheme.element.max)
        if amax == 0:
            scales[at], values[at] = {"e8m0": (127, F(1)), "fp32": (F(1), F(1))}.get(name) or mantissa_scale(
                F(1), name
            )
        elif name == "e8m0":
            assert layout is not None
            scales[at] = power_of_two(float(amax), scheme.inner.rule, layout)
            values[at] = stored_value(scales[at], "e8m0")
        else:
            extent = high[at] - low[at] if scheme.zero is not None else amax
            scales[at], values[at] = mantissa_scale(F(F(extent / span) / outer), name)
        if scheme.zero is not None:
            top = int(scheme.element.max)
            zeros[at] = (top + 1) // 2
            if amax != 0:
                zeros[at] = min(max(int(np.rint(F(-low[at] / values[at]))), 0), top)
        values[at] = F(values[at] * outer)
    return assemble(x, scheme, layout, scales, values, zeros, outers)


def assemble(
    x: NDArray[np.float32],
    scheme: Scheme,
    layout: Layout | None,
    scales: dict[Index, Any],
    values: dict[Index, np.float32],
    zeros: dict[Index, int],
    outers: dict[Index, np.float32],
) -> dict[str, Any]:
    """Divide, add the zero point, round and clamp every element; then decode it again."""
    codes = np.zeros(x.shape, np.int64)
    decoded = np.zeros(x.shape, np.float32)
    for index in itertools.product(*map(range, x.shape)):
        at = tile_of(index, x.shape, scheme.inner.tile)
        y = F(x[index] / values[at])
        if scheme.zero is not None:
            y = F(y + F(zeros[at]))
        codes[index] = nearest_code(float(y), scheme, layout)
        element = element_value(int(codes[index]), scheme, layout)
        decoded[index] = F(F(element - F(zeros[at])) * values[at])
    return {"codes": codes, "scales": scales, "zeros": zeros, "outers": outers, "decoded": decoded}


def nearest_code(y: float, scheme: Scheme, layout: Layout | None) -> int:
    if layout is not None:
        return encode(layout, y, "nearest_even", "saturate").code
    table = [Fraction(v) for v in scheme.element.table]
    distance = [abs(Fraction(y) - v) for v in table]
    return min(range(len(table)), key=lambda code: (distance[code], code % 2))


def element_value(code: int, scheme: Scheme, layout: Layout | None) -> np.float32:
    if layout is None:
        return F(scheme.element.table[code])
    meaning = layout.decode(code)
    return F(-0.0) if meaning == "-0" else F(float(meaning))
