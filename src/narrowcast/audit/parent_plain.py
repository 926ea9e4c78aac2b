"""Rules about what is not quantized, beside the parent: those tensors should be the parent's, bit for bit.

    the same bits        healthy                     rounded to another dtype    a rule about coverage speaks of it
    norms divided by     smoothing, when the columns after them are multiplied by the same factors
    anything else        another model, or a fault

So smoothed layers are looked at here as well: whether their factors are taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from narrowcast.audit.findings import Finding
from narrowcast.audit.pair_smoothing import LIMIT, F, norms_before
from narrowcast.audit.pairs import FAR, Pair, in_words
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject

NEAR = 0.1  # of the logarithm of a factor that was found on weights rounded to four bits
FEW = 0.5  # the share of plain tensors from which on differing ones mean another model
ISOLATED = 0.01  # the share of values below which those that differ are damage, and no mistake of the whole
ROUNDED = 6.0  # dB that any sound rounding keeps: two bits leave 9 of normal weights, a mistake 3 at most
CLOSE = 30.0  # dB above which a plain tensor was rounded on its way, and is no other one

Back = Literal["yes", "no", "unknown"]


def taken_back(subject: Subject, pair: Pair) -> Back:
    """Whether the norm before a smoothed matrix has the reciprocal factors; norms may store their weight less one."""
    smoothed = pair.smoothed
    if smoothed is None:
        return "unknown"
    for name in norms_before(pair.name):
        norm = subject.pairs.get(name)
        if norm is None or norm.unlike or norm.coded is not None or smoothed.columns < LIMIT:
            continue
        if not norm.differing:
            return "no"
        before, after = (side.values(0, 1)[0].astype(np.float64) for side in (norm.original, norm.child))
        if before.shape != smoothed.factors.shape:
            continue
        return (
            "yes"
            if any(_divided(before + one, after + one, smoothed.factors) for one in (0.0, 1.0))
            else "unknown"
        )
    return "unknown"


def _divided(before: F, after: F, factors: F) -> bool:
    """Whether a norm's weights were divided by factors, in most columns: those of small columns are found badly where
    large ones set their scale."""
    with np.errstate(all="ignore"):
        change = np.log(np.abs(before / after))
        left = np.abs(change - np.log(np.abs(factors)))
    usable = np.isfinite(change) & np.isfinite(left)
    if not usable.any():
        return False
    off, moved = (float(np.median(np.abs(side[usable]))) for side in (left, change))
    return off <= NEAR and off <= moved / 4


def _explained(subject: Subject) -> set[str]:
    """Norms whose change is the other half of smoothing."""
    return {
        name
        for pair in subject.pairs.values()
        if pair.smoothed is not None and taken_back(subject, pair) == "yes"
        for name in norms_before(pair.name)
    }  # fmt: skip


@rule("NC701", "warning", reads="parent")
def not_in_the_parent(subject: Subject) -> Iterator[Finding]:
    """Quantized layers have no original in the parent.

    What: the parent has no tensor of the name; these layers were compared with nothing.
    Why: names differ between two versions of a library, or the parent is another model; silence about such a
    layer says nothing.
    Fix: give the parent that this checkpoint was made from, with the same names.
    False alarm: layers that were added on purpose, such as draft heads.
    """
    left = [name for name in subject.quantized if name not in subject.originals]
    if subject.parent is not None and left:
        everything = len(left) == len(subject.quantized)
        yield Finding(
            f"{len(left)} of {len(subject.quantized)} quantized layers are not in the parent",
            tensor=left[0], count=len(left), remedy="give the model that this was made from to --against",
            severity="error" if everything else None,
        )  # fmt: skip


@rule("NC702", "error", reads="parent")
def another_model(subject: Subject) -> Iterator[Finding]:
    """What is not quantized differs from the parent.

    What: norms, embeddings, biases or plain layers hold other values than the parent's tensors of the same names.
    Values that were only rounded to another dtype are not meant, nor norms that take back a smoothing.
    Why: quantization leaves these tensors as they are. Where most of them differ, this is not the parent, and
    nothing else that is said against it counts; where one differs, that layer is damaged or was changed.
    Fix: give the right parent, or copy the tensor from it.
    False alarm: methods that train norms or biases on purpose (EfficientQAT, AutoRound with norm tuning). A file
    without quantized layers whose linears alone are near the parent's is a decoded copy, and an information.
    """
    plain = [p for p in subject.pairs.values() if p.coded is None and not p.unlike and p.errors.elements]
    explained = _explained(subject)
    differ = [p for p in plain if p.differing and not p.cast and p.name not in explained]
    if differ and _decoded(subject, differ, len(plain)):
        yield Finding(
            f"{len(differ)} linear layers are near the parent's ({min(p.sqnr for p in differ):.1f} dB or more) and the "
            "rest is the same: a decoded copy of a quantized model, or trained on",
            tensor=differ[0].name, count=len(differ), severity="info",
        )  # fmt: skip
        return
    if len(differ) > FEW * len(plain):
        worst = min(differ, key=lambda pair: pair.sqnr)
        yield Finding(
            f"{len(differ)} of {len(plain)} tensors that are not quantized differ: this is not the parent",
            tensor=worst.name, count=len(differ), got=f"{worst.sqnr:.1f} dB", wanted="the same bits",
            remedy="give the model that this was made from to --against",
        )  # fmt: skip
        return
    for pair in differ:
        single = pair.differing < pair.errors.elements * ISOLATED
        found = (
            None if single else pair.diagnosis
        )  # what explains a matrix is fitted to single elements as well
        yield Finding(
            f"{pair.differing:,} of {pair.errors.elements:,} values are not the parent's, {pair.sqnr:.1f} dB"
            + (f": {found.name}" if found else ""),
            tensor=pair.name, count=pair.differing, wanted="the parent's bits",
            remedy=f"{in_words(found)}: {found.remedy}" if found else "copy the tensor from the parent",
            severity=None if pair.sqnr < CLOSE else "warning",
        )  # fmt: skip


def _decoded(subject: Subject, differ: list[Pair], plain: int) -> bool:
    """Whether most linears of a file without codes were rounded, and nothing else was touched."""
    linear = {module.name for module in subject.modules if module.linear}
    near = all(pair.name in linear and pair.sqnr >= ROUNDED for pair in differ)
    return not subject.quantized and near and len(differ) < plain and 2 * len(differ) > len(linear)


@rule("NC705", "error", reads="parent")
def never_quantized(subject: Subject) -> Iterator[Finding]:
    """Layers that the config calls quantized are the parent's floats.

    What: the config says that these layers are quantized, and the file holds the parent's own bits under their names.
    Why: the job wrote its config and skipped the weights; an engine looks for scales that are not there.
    Fix: quantize them, or list them as ignored.
    False alarm: none known.
    """
    takes = subject.contents.takes if subject.contents is not None else None
    if takes is None:
        return
    linear = {module.name for module in subject.modules if module.linear}
    left = [
        pair.name
        for pair in subject.pairs.values()
        if pair.coded is None
        and not pair.unlike
        and not pair.differing
        and pair.name in linear
        and takes(pair.name)
    ]
    if left:
        yield Finding(
            f"{len(left)} layers are the parent's floats, and the config says that they are quantized",
            tensor=left[0], count=len(left), remedy="narrowcast quantize, or put their names under ignore",
        )  # fmt: skip


@rule("NC703", "info", reads="parent")
def smoothed(subject: Subject) -> Iterator[Finding]:
    """Layers were smoothed: their columns have factors that something before them takes back.

    What: rows or columns of a matrix are the parent's times factors of their own (AWQ, SmoothQuant), and apart
    from that it lost what its scheme must lose. Where the norm before it has the reciprocal factors, that is
    checked.
    Why: the weights are far from the parent's, and the model computes the same; an SQNR against the parent means
    nothing for these layers, and one of their outputs would.
    Fix: nothing is wrong.
    False alarm: factors of the layers before o and down are not checked here, only named.
    """
    states = {p.name: taken_back(subject, p) for p in subject.pairs.values() if p.smoothed is not None}
    kept = [name for name, state in states.items() if state != "no" and not _too_far(subject.pairs[name])]
    if kept:
        checked = sum(states[name] == "yes" for name in kept)
        worst = max(
            (subject.pairs[name] for name in kept), key=lambda p: p.smoothed.columns if p.smoothed else 0
        )
        assert worst.smoothed is not None
        yield Finding(
            f"{len(kept)} layers were smoothed, columns by {worst.smoothed.columns:.2f} times on average at most; of "
            f"{checked} the norm before takes it back",
            tensor=worst.name, count=len(kept), facts={"checked": checked, "layers": kept[:32]},
        )  # fmt: skip


@rule("NC704", "error", reads="parent")
def smoothed_one_sided(subject: Subject) -> Iterator[Finding]:
    """A layer was smoothed, and nothing takes the factors back.

    What: the columns of a matrix are the parent's times factors of their own, and the norm before it is the
    parent's, bit for bit; or, without these factors, the matrix is still 10 dB below its scheme.
    Why: the input of the layer is not divided by what its weights were multiplied with: every output is wrong.
    Fix: take the norm of the smoothed model, or store the factors beside the weight (pre_quant_scale) for an
    engine that reads them.
    False alarm: an engine that multiplies the input itself, from a file that is not here.
    """
    for pair in subject.pairs.values():
        if pair.smoothed is None:
            continue
        back = taken_back(subject, pair)
        if back == "no" or _too_far(pair):
            yield Finding(
                f"columns were multiplied by {pair.smoothed.columns:.2f} times on average, "
                + ("and the norm before is the parent's" if back == "no" else "and the rest is far from the parent"),
                tensor=pair.name,
                got=f"{pair.smoothed.before:.1f} dB, {pair.smoothed.after:.1f} dB without the factors",
                wanted=f"about {pair.expected:.1f} dB", remedy="take the norms of the smoothed model as well",
            )  # fmt: skip


def _too_far(pair: Pair) -> bool:
    return pair.smoothed is not None and pair.expected - pair.smoothed.after >= FAR
