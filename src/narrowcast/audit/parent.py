"""Rules about a checkpoint beside its parent: is it that model, and is what it lost what its scheme must lose?

    gap = dB that the stored scheme keeps of this very data - dB that the file keeps

The scheme is tried with the quantizer of this toolkit on a sample of each matrix (``pair_sample``), so a heavy
tail is no fault. Rounding to nearest has a gap of 0, searched scales one below. Methods that move weights on
purpose have one above: GPTQ on 25 layers of SmolLM2-135M (INT4, groups of 64 and whole rows, with and without
reordering, 16384 tokens of English text) costs 3.0 to 3.7 dB in the median and 6.0 at most. A zero point off by
one step costs 20 log10(sqrt(12)) = 10.8 dB, and worse mistakes more. So 7.5 dB, between what GPTQ does and what
the smallest mistake does, is where suspicion begins, and 10 dB, just below that mistake, an error even where no
mistake is recognized.

What the plain tensors say is in ``parent_plain``, channels are in ``parent_channels``, whole models in
``parent_model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import erf, isfinite, sqrt

from narrowcast.audit import parent_channels, parent_model, parent_plain
from narrowcast.audit.findings import Finding
from narrowcast.audit.pairs import FAR, SUSPECT, Pair, in_words
from narrowcast.audit.parent_channels import moved
from narrowcast.audit.rules import rule
from narrowcast.numbers.formats import Format
from narrowcast.tensors.metrics import half_steps

__all__ = ["parent_channels", "parent_model", "parent_plain"]

AGAIN = "quantize it again from the parent"
TAIL = 16.0  # sigma at which a tile's amax lies when its elements are lost for a reason: normal rows end at 4
GONE = 0.9  # the share of elements lost to underflow from which on nothing of a matrix is left
ISOLATED = 2.0**-10  # the share of elements below which those beyond the bound are single ones
USUAL = 64.0  # times the mean square error: eight times as far as usual, as moving to a next code never is
WEIGHTY = 0.1  # the share of the noise that single elements must have


@rule("NC700", "error", scope="pair", reads="parent")
def matrix_of_another_shape(pair: Pair) -> Iterator[Finding]:
    """A tensor has another shape than in the parent.

    What: a tensor of this name exists on both sides, and its shape, or its kind of numbers, is another.
    Why: an engine builds the layer from the config, and then reads nonsense or refuses; a transposed expert is
    the usual case.
    Fix: store it in the parent's orientation, or give the right parent.
    False alarm: a vocabulary that was padded or extended after the parent was saved.
    """
    if pair.unlike:
        found = pair.diagnosis
        yield Finding(
            pair.unlike + (f", its transpose ({found.after:.1f} dB)" if found else ""),
            tensor=pair.name, got=str(list(pair.child.shape)), wanted=str(list(pair.original.shape)),
            remedy=found.remedy if found else "check that --against is the model it was made from",
        )  # fmt: skip


@rule("NC710", "error", scope="pair", reads="parent")
def far_from_the_parent(pair: Pair) -> Iterator[Finding]:
    """A matrix lost far more than its scheme must lose.

    What: the SQNR against the parent is 10 dB or more below what the stored scheme keeps of the same rows, or 7.5
    dB and one known mistake explains it: swapped neighbours, a transposed matrix, a dropped or inverted scale.
    Why: such a loss cannot come from the format; the layer computes something else than the model.
    Fix: undo the mistake that is named, or quantize the layer again from the parent.
    False alarm: rotations that were merged into the weights (QuaRot, SpinQuant) give a model with other weights
    and the same outputs.
    """
    if pair.coded is None or pair.smoothed is not None:
        return
    found, gap = pair.diagnosis, pair.gap
    if not (gap >= FAR or (gap >= SUSPECT and found is not None)):
        return
    said = f"{pair.sampled:.1f} dB where {pair.scheme} keeps {pair.expected:.1f} dB of this data"
    if found is not None:
        said += f": {found.name} ({found.after:.1f} dB without that)"
    yield Finding(
        said, tensor=pair.name, got=f"SQNR {pair.sampled:.1f} dB", wanted=f"about {pair.expected:.1f} dB",
        remedy=f"{in_words(found)}: {found.remedy}" if found is not None else AGAIN,
        facts={"sqnr": pair.sqnr, "expected": pair.expected, "diagnosis": found.to_json() if found else None},
    )  # fmt: skip


@rule("NC711", "warning", scope="pair", reads="parent")
def below_the_scheme(pair: Pair) -> Iterator[Finding]:
    """A matrix lost clearly more than its scheme must lose.

    What: the SQNR against the parent is 7.5 to 10 dB below what the stored scheme keeps of the same rows, and no
    known mistake explains it.
    Why: methods that move weights on purpose, such as GPTQ, cost about 3 dB and rarely more than 5; scales that
    were rounded after quantizing, or data quantized twice, cost this much.
    Fix: compare the outputs of the layer on real inputs; if they are worse than rounding to nearest makes them,
    quantize it again.
    False alarm: GPTQ or AutoRound on a layer whose inputs are nearly dependent.
    """
    if (
        pair.coded is not None
        and pair.smoothed is None
        and pair.diagnosis is None
        and SUSPECT <= pair.gap < FAR
    ):
        yield Finding(
            f"{pair.sampled:.1f} dB where {pair.scheme} keeps {pair.expected:.1f} dB of this data",
            tensor=pair.name, got=f"SQNR {pair.sampled:.1f} dB", wanted=f"about {pair.expected:.1f} dB",
            remedy="compare the layer's outputs, or quantize it again from the parent",
            facts={"sqnr": pair.sqnr, "expected": pair.expected},
        )  # fmt: skip


@rule("NC712", "error", scope="pair", reads="parent")
def not_finite_beside_the_parent(pair: Pair) -> Iterator[Finding]:
    """Elements are NaN or infinite on one side only.

    What: the difference to the parent is not a number: a code or a scale decodes to NaN or infinity where the
    parent is finite, or the parent holds one itself, which no code can keep.
    Why: one such element makes a whole output NaN.
    Fix: quantize the layer again; repair the parent first where the fault is there.
    False alarm: none known.
    """
    if pair.broken:
        yield Finding(
            f"{pair.broken:,} elements are not finite here or in the parent", tensor=pair.name, count=pair.broken,
            wanted="finite values", remedy=AGAIN,
        )  # fmt: skip


@rule("NC713", "info", scope="pair", reads="parent")
def nothing_was_lost(pair: Pair) -> Iterator[Finding]:
    """A quantized matrix equals its parent exactly.

    What: every element of a quantized matrix decodes to the parent's value.
    Why: the parent lies on this grid already: it is a decoded copy of a quantized model, and no original;
    whatever was lost before is not seen here.
    Fix: compare with the model that was trained.
    False alarm: models trained on the grid (QAT, gpt-oss) have no other original.
    """
    if (
        pair.coded is not None
        and not pair.unlike
        and pair.errors.signal
        and not pair.errors.noise
        and not pair.broken
    ):
        yield Finding("decodes to the parent's values exactly", tensor=pair.name, count=pair.errors.elements)


@rule("NC720", "warning", scope="pair", reads="parent")
def clipped_by_the_scale(pair: Pair) -> Iterator[Finding]:
    """Clipping alone costs more than the whole scheme should.

    What: elements beyond the largest code, under the scale that is stored, lose more energy than rounding with
    fitting scales would lose in all. Where the matrix as a whole loses less than 7.5 dB by it, it is an information.
    Why: the largest weights of a layer carry its outliers; a scale that is too small cuts all of them off. A
    search for the best scale never does this: it weighs clipping against rounding.
    Fix: quantize the layer again with scales from its amax.
    False alarm: searches that weigh columns by their inputs clip what they hold for unimportant: AutoRound's up to 5 dB
    on SmolLM2-135M.
    """
    if pair.coded is None or pair.smoothed is not None or not isfinite(pair.expected):
        return
    allowed = pair.errors.signal * 10 ** (-pair.expected / 10)
    if pair.clipping > allowed and pair.gap > 1:
        yield Finding(
            f"{pair.errors.clipped:,} elements are clipped ({pair.errors.clipped / pair.errors.elements:.2%}), "
            f"{pair.share(pair.clipping):.0%} of the noise",
            tensor=pair.name, count=pair.errors.clipped, severity=None if pair.gap >= SUSPECT else "info",
            got=f"clipping alone is {pair.clipping / allowed:.1f} times",
            wanted="less than all that the scheme loses", remedy=AGAIN + " with scales from its amax",
            facts={"clipped": pair.errors.clipped, "share_of_noise": pair.share(pair.clipping)},
        )  # fmt: skip


def usual_underflow(element: Format) -> float:
    """The share of normal elements that becomes zero when the amax of their tile lies at 16 sigma: none but an outlier
    makes more. Half the smallest step over the largest value, as a share of sigma, under the error function."""
    half = float(half_steps(element)[0]) / element.max
    return erf(half * TAIL / sqrt(2))


@rule("NC721", "warning", scope="pair", reads="parent")
def lost_to_underflow(pair: Pair) -> Iterator[Finding]:
    """Elements that were not zero became zero, more than the format explains.

    What: a share of elements underflowed that normal weights do not reach even with an amax of 16 sigma in every
    tile: 1 % in FP8, 50 % in FP4, 75 % in INT4; an error from 90 % on.
    Why: one outlier can set a scale that flushes all others to zero. The SQNR does not show it, because the
    outlier carries the signal.
    Fix: a finer scale (per channel or per group), or keep the layer unquantized; look at the outlier first, it
    may be a fault of the parent.
    False alarm: layers that are mostly tiny on purpose, such as pruned ones whose zeros are not exact.
    """
    if pair.coded is None or not pair.errors.elements:
        return
    share = pair.errors.underflowed / pair.errors.elements
    usual = max(usual_underflow(pair.coded.how.scheme.element), 0.01)
    if share > usual:
        yield Finding(
            f"{pair.errors.underflowed:,} of {pair.errors.elements:,} elements became zero ({share:.1%}), "
            f"under an amax of {pair.amax:.3g}",
            tensor=pair.name, count=pair.errors.underflowed, got=f"{share:.1%} underflowed",
            wanted=f"{usual:.0%} at most", remedy="use a finer scale, or keep the layer unquantized; look at its amax",
            severity="error" if share >= GONE else None,
            facts={"underflowed": pair.errors.underflowed, "amax": pair.amax},
        )  # fmt: skip


@rule("NC722", "warning", scope="pair", reads="parent")
def lost_tiles(pair: Pair) -> Iterator[Finding]:
    """Whole blocks or rows became zero.

    What: every element of a tile (a row, where one scale serves the matrix) decodes to zero, and in the parent at
    least one does not.
    Why: an output channel, or a stretch of its inputs, is gone. A scale that underflowed, or was left out, does
    this; so does an outer scale that is too large for the small blocks.
    Fix: quantize the layer again; where a shared outer scale is the cause, keep it for fused siblings only.
    False alarm: blocks some thousand times smaller than the matrix's amax, which no E4M3 scale can hold; their
    loss costs nothing.
    """
    if pair.lost:
        what = "rows" if pair.coded is not None and not pair.coded.how.scheme.inner.tile[0] else "blocks"
        yield Finding(
            f"{pair.lost:,} of {pair.tiles:,} {what} became zero that are not zero in the parent",
            tensor=pair.name, at=pair.first_lost, count=pair.lost, remedy=AGAIN,
            severity="error" if pair.lost >= GONE * pair.tiles else None,
        )  # fmt: skip


@rule("NC723", "warning", scope="pair", reads="parent")
def single_elements_off(pair: Pair) -> Iterator[Finding]:
    """A few elements are far from the parent, and the rest is not.

    What: less than one element in a thousand lies beyond the bound of its rounding, and these carry a tenth of
    the noise or more, or are each eight times as far off as elements usually are.
    Why: rounding cannot do this, and methods that move weights move most of them; single elements are damage:
    flipped bits, a patched tensor, a chunk written twice.
    Fix: download or quantize the layer again.
    False alarm: sparse corrections that are stored in the weight itself.
    """
    e, weighty = pair.errors, pair.share(pair.beyond) >= WEIGHTY
    if (
        pair.coded is not None
        and 0 < e.beyond <= max(ISOLATED * e.elements, 1)
        and (weighty or pair.beyond / e.beyond >= USUAL * e.noise / e.elements)
    ):
        row, column = (c[0].index if c else -1 for c in (pair.rows, pair.columns))
        yield Finding(
            f"{e.beyond:,} elements are beyond any rounding and carry {pair.share(pair.beyond):.0%} of the noise",
            tensor=pair.name, at=(row, column) if weighty else None, count=e.beyond,
            remedy="download or quantize the layer again",
        )  # fmt: skip


@rule("NC724", "info", scope="pair", reads="parent")
def not_rounded_to_nearest(pair: Pair) -> Iterator[Finding]:
    """Weights were moved on purpose, not rounded to nearest.

    What: more than one element in a hundred lies beyond the bound of rounding to nearest under its scale, and that
    costs half a dB or more, but not what a mistake costs.
    Why: GPTQ, AutoRound and stochastic rounding look like this; good to know when SQNRs are compared, because
    these methods trade the weights' error for the outputs'.
    Fix: nothing is wrong.
    False alarm: the parent may also be another revision of the model, slightly trained on.
    """
    if moved(pair):
        share = pair.errors.beyond / pair.errors.elements
        yield Finding(
            f"{share:.0%} of the elements are not rounded to nearest, {pair.gap:+.1f} dB beside it", tensor=pair.name,
            count=pair.errors.beyond, facts={"gap": pair.gap},
        )  # fmt: skip
