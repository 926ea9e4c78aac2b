"""Rules about channels beside the parent: which rows and columns lose most, which are outliers, and what those cost.

A channel is a row (an output) or a column (an input). The columns of q, k, v, gate and up are channels of the residual
stream, where some are massive in every layer: they are the same indices all over the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isfinite

from narrowcast.audit.findings import Finding
from narrowcast.audit.pair_smoothing import norms_before
from narrowcast.audit.pairs import FAR, SUSPECT, Channel, Pair, layer_of
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject

CARRIES = 0.25  # of the mean signal of a channel, from which on its loss matters
LOST = 6.5  # dB, below which a channel is lost: half its scale leaves 20 log10 2 = 6.0, twice its scale 0
GREAT = 0.25  # the share of a matrix's noise from which on one channel matters to the whole
MOVED = 0.01  # the share of elements beyond rounding to nearest, from which on a method moved them
MOVING = 0.5  # dB that this costs at least; scales that were rounded after the codes were made cost less
COST = 3.0  # dB that outliers take from other columns, from which on it is said
SHARED = 3  # layers that must share an outlier column


def moved(pair: Pair) -> bool:
    """Whether a method moved weights on purpose, as GPTQ and AutoRound do, and did not round each to nearest."""
    beyond = pair.errors.beyond > MOVED * pair.errors.elements
    return pair.coded is not None and pair.smoothed is None and beyond and MOVING <= pair.gap < SUSPECT


def _bad(pair: Pair, channels: tuple[Channel, ...], count: int, median: float) -> list[Channel]:
    """Channels that lost far more than the usual one of their matrix and than the scheme."""
    limit = min(median, pair.expected) - FAR
    return [c for c in channels if c.sqnr < limit and c.signal * count >= CARRIES]


@rule("NC730", "warning", scope="pair", reads="parent")
def worst_channels(pair: Pair) -> Iterator[Finding]:
    """Single channels lost far more than the rest of their matrix.

    What: a row or a column that carries its share of the signal has an SQNR 10 dB or more below the median
    channel's and below what the scheme keeps. It is a warning where that is below 6.5 dB, or where one channel has a
    quarter of the noise of its matrix; else, and where weights were moved on purpose, an information.
    Why: the sum over a matrix hides it: one output in four thousand that is wrong costs nothing in dB, and the
    model computes with it in every token. A scale that is wrong for one row does this, and so does an outlier in
    a shared tile.
    Fix: quantize the layer again; if it is an outlier's doing, use a finer scale.
    False alarm: GPTQ moves the weights of some channels to spare the outputs, the more the fewer tokens it saw; compare
    outputs then. Per-tensor integer scales on rows of very different size; then the finer scale is what helps.
    """
    if pair.coded is None or pair.smoothed is not None or not pair.gap < FAR or not isfinite(pair.expected):
        return
    n, k = pair.coded.shape
    rows, columns = _bad(pair, pair.rows, n, pair.median[0]), _bad(pair, pair.columns, k, pair.median[1])
    for what, found, median in (("row", rows, pair.median[0]), ("column", columns, pair.median[1])):
        if found:
            worst = found[0]
            more = f" and {len(found) - 1} more or less like it" if len(found) > 1 else ""
            yield Finding(
                f"{what} {worst.index}{more}: {worst.sqnr:.1f} dB where the median {what} keeps {median:.1f} dB",
                tensor=pair.name, at=(worst.index, 0) if what == "row" else (0, worst.index), count=len(found),
                severity=None if (worst.sqnr < LOST or worst.noise >= GREAT) and not moved(pair) else "info",
                got=f"{worst.noise:.0%} of the noise of the matrix", remedy="quantize it again, or use a finer scale",
                facts={what: worst.index, "sqnr": worst.sqnr, "median": median, "ratio": worst.ratio},
            )  # fmt: skip
            return


@rule("NC731", "info", scope="pair", reads="parent")
def outliers_cost(pair: Pair) -> Iterator[Finding]:
    """Outlier columns take precision from the others.

    What: some columns have an amax at least 8 times the median one, and without them the other columns would keep
    3 dB or more.
    Why: elements that share a scale with an outlier are rounded by its step.
    Fix: a finer scale along the inputs (groups), smoothing (AWQ, SmoothQuant) or a rotation moves the cost
    elsewhere.
    False alarm: none; whether the layer's outputs suffer depends on the inputs of these columns.
    """
    if pair.kept is not None and pair.outliers and pair.kept.outliers >= COST:
        worst = pair.outliers[0]
        yield Finding(
            f"{_columns(pair.outliers)} (amax up to {worst.ratio:.0f} times the median) cost the others "
            f"{pair.kept.outliers:.1f} dB",
            tensor=pair.name, at=(0, worst.index), count=len(pair.outliers),
            remedy="use groups along the inputs, or a method that smooths them",
            facts={"columns": [c.index for c in pair.outliers], "cost": pair.kept.outliers},
        )  # fmt: skip


def _columns(channels: tuple[Channel, ...]) -> str:
    names = [str(c.index) for c in channels[:4]]
    more = f" and {len(channels) - 4} more" if len(channels) > 4 else ""
    return f"column{'s' if len(channels) > 1 else ''} {', '.join(names)}{more}"


@rule("NC732", "info", reads="parent")
def outliers_of_the_residual_stream(subject: Subject) -> Iterator[Finding]:
    """The same input columns are outliers in many layers.

    What: columns whose amax is at least 8 times the median one, in q, k, v, gate or up projections of three
    layers or more, with the same index: the outlier channels of the residual stream.
    Why: these channels carry massive activations too; quantized inputs, and weights that share scales with them,
    lose most there.
    Fix: keep scales fine along the inputs, or smooth exactly these channels.
    False alarm: none; it says where to look.
    """
    layers: dict[int, set[int]] = defaultdict(set)
    ratio: Counter[int] = Counter()
    everywhere: set[int] = set()
    for pair in subject.pairs.values():
        layer = layer_of(pair.name)
        if pair.coded is None or layer is None or not norms_before(pair.name):
            continue
        everywhere.add(layer)
        for channel in pair.outliers:
            layers[channel.index].add(layer)
            ratio[channel.index] = max(ratio[channel.index], round(channel.ratio))
    shared = sorted((c for c, at in layers.items() if len(at) >= SHARED), key=lambda c: (-len(layers[c]), c))
    if shared:
        first = shared[0]
        others = f", and {len(shared) - 1} more columns" if len(shared) > 1 else ""
        yield Finding(
            f"input column {first} is an outlier in {len(layers[first])} of {len(everywhere)} layers, up to "
            f"{ratio[first]} times the median amax{others}",
            count=len(shared), facts={"columns": {str(c): len(layers[c]) for c in shared[:32]}},
        )  # fmt: skip
