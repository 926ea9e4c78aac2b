"""What a checkpoint lost against its parent as a whole: where the noise is, and whether a finer scale is worth it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf, isfinite, log10

from narrowcast.audit.findings import Finding
from narrowcast.audit.pair_sample import TILES
from narrowcast.audit.pairs import Pair, layer_of
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject

BIT = 20 * log10(2)  # dB of one more bit an element, which a finer scale must beat
SCALE_BITS = 16
WORTH = 3.0  # dB beyond its bits


def _compared(subject: Subject) -> list[Pair]:
    return [p for p in subject.pairs.values() if p.coded is not None and not p.unlike]


@rule("NC740", "info", reads="parent")
def finer_scale(subject: Subject) -> Iterator[Finding]:
    """A finer scale would keep clearly more than its bits cost.

    What: the same element under scales of the tensor, of channels, of groups of 128, 32 and 16, tried on samples
    of the parent: by role and scheme, where the best gains 3 dB more than its scales would buy as bits (6.02 dB
    each).
    Why: the granularity is the cheapest choice there is: a channel's scale costs nothing, a group of 32 half a
    bit.
    Fix: quantize with the preset of that granularity, if the engine has a kernel for it.
    False alarm: none; it is a comparison, and weights are not outputs.
    """
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in _compared(subject):
        if pair.kept is not None and isfinite(pair.kept.scheme):
            groups[pair.child.role, pair.scheme].append(pair)
    for (role, scheme), pairs in groups.items():
        own = _mean(p.kept.scheme for p in pairs if p.kept)
        tried = {tile: _mean(p.kept.by_tile()[tile] for p in pairs if p.kept) for tile in TILES}
        width = pairs[0].coded.how.scheme.inner.tile[1] if pairs[0].coded else 0
        paid = _bits(width)
        best = max(tried, key=lambda tile: tried[tile] - BIT * _bits(TILES[tile][1]))
        gain = tried[best] - own - BIT * max(_bits(TILES[best][1]) - paid, 0)
        if gain >= WORTH:
            yield Finding(
                f"{role}: a scale for each {best} keeps {tried[best]:.1f} dB where {scheme} keeps {own:.1f} ("
                + ", ".join(f"{tile} {db:.1f}" for tile, db in tried.items()) + ")",
                tensor=pairs[0].name, count=len(pairs), got=f"{own:.1f} dB", wanted=f"{tried[best]:.1f} dB",
                remedy=f"quantize again with scales for each {best}", facts={"stored": own, **tried},
            )  # fmt: skip


def _bits(width: int) -> float:
    """Bits an element that a scale for so many columns costs; a whole row's are none worth counting."""
    return SCALE_BITS / width if width else 0.0


def _mean(decibels: Iterable[float]) -> float:
    """The dB of the mean noise, each matrix with a signal of 1."""
    found = [10 ** (-db / 10) for db in decibels if db > -inf]
    noise = sum(found) / len(found) if found else 0.0
    return -10 * log10(noise) if noise else inf


@rule("NC741", "info", reads="parent")
def where_the_noise_is(subject: Subject) -> Iterator[Finding]:
    """Which roles and layers carry the noise of the quantized weights.

    What: shares of the whole noise energy against the parent, by role, and the layers and matrices with most of
    it.
    Why: this is where a higher precision, or another method, gains most.
    Fix: nothing is wrong; a mixed recipe would begin with these.
    False alarm: it is the weights' noise; what it does to outputs depends on the inputs.
    """
    pairs = [pair for pair in _compared(subject) if pair.errors.noise and isfinite(pair.errors.noise)]
    total = sum(pair.errors.noise for pair in pairs)
    if not total:
        return
    roles: dict[str, float] = defaultdict(float)
    layers: dict[int | None, float] = defaultdict(float)
    for pair in pairs:
        roles[pair.child.role] += pair.errors.noise / total
        layers[layer_of(pair.name)] += pair.errors.noise / total
    by_role = sorted(roles.items(), key=lambda item: -item[1])
    by_layer = sorted(((n, s) for n, s in layers.items() if n is not None), key=lambda item: -item[1])
    least = min(pairs, key=lambda pair: pair.sqnr)
    noisy = f"; most in layer {', '.join(f'{n} ({s:.0%})' for n, s in by_layer[:3])}" if by_layer else ""
    yield Finding(
        f"noise by role: {', '.join(f'{role} {share:.0%}' for role, share in by_role[:4])}{noisy}; the least SQNR is "
        f"{least.sqnr:.1f} dB",
        tensor=least.name, count=len(pairs),
        facts={"roles": dict(by_role), "layers": {str(n): s for n, s in by_layer}, "sqnr": least.sqnr},
    )  # fmt: skip
