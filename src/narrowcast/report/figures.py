"""The plots of an audit's page.

    range       magnitudes of decoded values beside the range of the format at a usual scale
    codes       how often each code occurs, in the order of the codes' values
    scales      how often each power of two occurs among the innermost scales, with what their format can hold

Magnitudes are estimated from counts, with codes and scales taken as independent and a scale as anywhere within its
power of two: P(binade) = sum over codes and scales of p(code) p(scale) [floor(log2 |code| + log2 scale) = binade].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit.run import Audit
from narrowcast.audit.subject import Histograms, Summary
from narrowcast.numbers.codec import decode_table
from narrowcast.report.drawing import BAND, Drawn, color_of, draw, name_series, power, style, width_of
from narrowcast.report.format_figures import layout
from narrowcast.report.pair_figures import pair_figures
from narrowcast.report.tables import exact, percent
from narrowcast.tensors.schemes import Scheme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST = -160  # the binade of the first count
FEW = 16  # codes that get a label each
WIDE = 64  # binades of a format whose range is no limit
Shares = NDArray[np.float64]


def figures(found: Audit) -> list[Drawn]:
    """Every plot that the audit has numbers for."""
    subject = found.subject
    kinds = {
        one.coded.how.scheme.name: one.coded.how.scheme for one in subject.quantized.values() if one.coded
    }
    with style():
        drawn = pair_figures(subject)
        for name, scheme in kinds.items():
            counted = {role: one for (role, kind), one in subject.histograms.items() if kind == name}
            if not counted:
                continue
            if scheme.group:
                drawn.append(layout(scheme))
            if all(one.codes is not None and one.codes.sum() for one in counted.values()):
                if scheme.zero is None:
                    members = [one for one in subject.matrices.values() if one.scheme == name]
                    drawn.append(_range(scheme, counted, members))
                drawn.append(_codes(scheme, counted))
            drawn.append(_scales(scheme, counted))
    return drawn


def _range(scheme: Scheme, counted: Mapping[str, Histograms], members: Sequence[Summary]) -> Drawn:
    """Magnitudes of decoded values, and the format's range at the median scale."""
    shares, zeros = {}, {}
    values = np.abs(decode_table(scheme.element).astype(np.float64))
    real = np.isfinite(values) & (values > 0)
    for role, one in counted.items():
        codes = _share(one.codes)
        outer = _outer([member for member in members if member.role == role])
        shares[role] = _spread(codes[real], np.log2(values[real] * outer), _share(one.binades))
        zeros[role] = float(codes[values == 0].sum())
    median = _median(sum((one.binades for one in counted.values()), np.zeros(320)))
    usual = float(np.exp2(median)) * _outer(members)
    low, high = (float(np.log2(edge * usual)) for edge in (values[real].min(), values[real].max()))

    def paint(axes: Axes) -> None:
        axes.axvspan(low, high, color=BAND, lw=0)
        _binades(axes, shares, (low, high))
        axes.set_xlabel("|value|, binades")
        axes.text((low + high) / 2, 1.02, f"{scheme.element.name} at the median scale", ha="center",
                  transform=axes.get_xaxis_transform())  # fmt: skip

    none = ", ".join(f"{role} {percent(share)}" for role, share in zeros.items())
    return Drawn(
        f"{scheme.name}: magnitudes beside the format's range",
        f"Shares of decoded values by power of two, estimated from the counts of codes and scales. The band is what "
        f"{scheme.element.name} reaches at the median scale. Exact zeros: {none}.",
        draw(paint),
    )


def _codes(scheme: Scheme, counted: Mapping[str, Histograms]) -> Drawn:
    values = decode_table(scheme.element).astype(np.float64)
    order = np.lexsort((~np.signbit(values), np.where(np.isnan(values), np.inf, values)))  # -0 before 0
    shares = {role: _share(one.codes)[order] for role, one in counted.items()}
    used = int(np.count_nonzero(sum(shares.values(), np.zeros(len(values)))))

    def paint(axes: Axes) -> None:
        places = np.arange(len(values))
        for i, share in enumerate(shares.values()):
            mark = "o" if len(values) <= FEW else ""
            axes.plot(places, 100 * share, color=color_of(i), lw=width_of(i), marker=mark, markersize=4)
        at = places if len(values) <= FEW else _round_places(values[order])
        axes.set_xticks(at, [_value(values[order][i]) for i in at], rotation=90 if len(at) > 9 else 0)
        axes.set_ylim(0)
        axes.set_xlabel("code, by its value")
        axes.set_ylabel("share of codes, %")
        name_series(axes, list(shares), sum(shares.values(), np.zeros(len(values))))

    return Drawn(
        f"{scheme.name}: codes",
        f"Shares of the codes of {scheme.element.name}, of which {used} of {len(values)} occur.",
        draw(paint),
    )


def _scales(scheme: Scheme, counted: Mapping[str, Histograms]) -> Drawn:
    shares = {role: _share(one.binades) for role, one in counted.items()}
    kind = scheme.inner.format
    low, high = float(np.log2(kind.smallest)), float(np.log2(kind.max))
    narrow = high - low < WIDE

    def paint(axes: Axes) -> None:
        if narrow:
            axes.axvspan(low, high, color=BAND, lw=0)
        _binades(axes, shares, (low, high) if narrow else None)
        axes.set_xlabel("innermost scale, binades")
        axes.set_ylabel("share of scales, %")

    return Drawn(
        f"{scheme.name}: scales",
        f"Shares of the innermost scales by power of two, stored as {kind.name}"
        + (", whose range is the band." if narrow else "."),
        draw(paint),
    )


def _binades(axes: Axes, shares: Mapping[str, Shares], wide: tuple[float, float] | None) -> None:
    """Steps over powers of two, each role in its colour; the axis is as wide as data that matter, and as ``wide``."""
    total = sum(shares.values(), np.zeros(320))
    seen = np.nonzero(total > 1e-5)[0] if total.any() else np.array([-LOWEST])
    left, right = int(seen[0]) + LOWEST - 1, int(seen[-1]) + LOWEST + 2
    if wide is not None:
        left, right = min(left, int(np.floor(wide[0])) - 1), max(right, int(np.ceil(wide[1])) + 1)
    for i, share in enumerate(shares.values()):
        window = 100 * share[left - LOWEST : right - LOWEST]
        axes.stairs(window, np.arange(left, right + 1), color=color_of(i), lw=width_of(i), baseline=0)
    every = max(1, -(-(right - left) // 8))
    ticks = range(-(-left // every) * every, right + 1, every)
    axes.set_xticks(list(ticks), [power(tick) for tick in ticks])
    axes.set_xlim(left, right)
    axes.set_ylim(0)
    axes.set_ylabel("share of values, %")
    name_series(axes, list(shares), total[left - LOWEST : right - LOWEST])


def _share(counts: NDArray[Any] | None) -> Shares:
    assert counts is not None
    return counts.astype(np.float64) / max(counts.sum(), 1)


def _spread(codes: Shares, logs: Shares, scales: Shares) -> Shares:
    """Shares of products by binade: ``codes`` with magnitudes 2^``logs``, times scales anywhere in their binade."""
    whole = np.floor(logs).astype(np.int64)
    found = np.zeros_like(scales)
    for share, base, above in zip(codes, whole, logs - whole, strict=True):
        found += share * ((1 - above) * np.roll(scales, base) + above * np.roll(scales, base + 1))
    return found


def _median(binades: NDArray[Any]) -> float:
    """log2 of the median scale, as the middle of its binade."""
    return int(np.searchsorted(np.cumsum(binades), binades.sum() / 2)) + LOWEST + 0.5


def _outer(members: Sequence[Summary]) -> float:
    """The geometric mean of the matrices' own scales, 1 where the innermost is the only one."""
    logs = [np.log2(one.outer) for one in members if one.outer is not None and 0 < one.outer < np.inf]
    return float(np.exp2(np.mean(logs))) if logs else 1.0


def _round_places(values: Shares) -> list[int]:
    """Places of some codes: the ends, zero, and powers of two between that are far enough apart to be labelled."""
    apart = len(values) // 12
    finite = np.nonzero(np.isfinite(values))[0]
    chosen = [
        int(finite[0]),
        int(np.abs(np.where(np.isfinite(values), values, np.inf)).argmin()),
        int(finite[-1]),
    ]
    for i in finite:
        half = abs(np.frexp(values[i])[0]) == 0.5
        if half and min(abs(i - other) for other in chosen) >= apart:
            chosen.append(int(i))
    return sorted(chosen)


def _value(x: float) -> str:
    text = exact(float(x))
    sign = "-" if text.startswith("-") else ""
    return sign + power(int(text.rpartition("^")[2])) if "^" in text else text
