"""What an evaluation found, as plain numbers: everything a page needs, nothing that needs torch.

    child, parent    who was run, and the perplexity of each
    gap              the child beside the parent: perplexity, KL divergence, agreement, probability of the true token
    layers           where the hidden states part;  fault: what the format cannot explain
    caches           the child again under quantized KV caches
    greedy, retrieval, structured     what the models write and find
    sums, clipped                     what the child's accumulators add, and what its stored input scales lose

Every mean is Σ sums / Σ counts over documents with an interval over documents. The verdict is one sentence and an exit
code: 0 fine, 1 worse than was asked for, 4 undecided.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

from narrowcast.statistics.bootstrap import Interval

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
Says = Literal["identical", "fine", "worse", "undecided", "probable bug", "measured"]


@dataclass(frozen=True)
class Side:
    """One model that was run: where it lies, how it is stored, the dtype of its residual stream, its perplexity."""

    path: str
    container: str
    dtype: str
    perplexity: Interval
    online: str | None = None


@dataclass(frozen=True)
class Text:
    """What was read: ``predicted`` tokens of ``pieces`` of at most ``context`` tokens, from ``documents``."""

    name: str
    sha256: str
    documents: int
    pieces: int
    predicted: int
    context: int
    first: tuple[tuple[int, str], ...]
    tokenizer: str


@dataclass(frozen=True)
class Percentiles:
    """Quantiles of one number per token: (percent, value), then the least and the largest."""

    at: tuple[tuple[float, float], ...]
    least: float
    largest: float


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` tokens with edges[i] <= value < edges[i + 1]; ``zero`` of exactly zero beside them."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zero: int


@dataclass(frozen=True)
class WorstToken:
    """A prediction where the models part most. ``before`` is the text that led to it, ``token`` what followed;
    ``parent`` and ``child`` are each one's best next token with its probability, ``p_parent`` and ``p_child`` the
    probabilities of what followed."""

    document: str
    place: int
    before: str
    token: str
    kl: float
    parent: tuple[str, float]
    child: tuple[str, float]
    p_parent: float
    p_child: float


@dataclass(frozen=True)
class Gap:
    """The child beside the parent, over the same token ids.

    ``perplexity`` is the relative change: 0.03 is 3 % worse. ``kl`` is KL(parent || child) in nats per token. ``top1``
    is the share of predictions with the same best token, ``top5`` the share of the parent's five best that are among
    the child's. ``shift`` is the change of the true token's probability, ``shift_rms`` its root mean square.
    """

    identical: bool
    perplexity: Interval
    kl: Interval
    kl_percentiles: Percentiles
    kl_histogram: Histogram
    top1: Interval
    top5: Interval
    shift: Interval
    shift_rms: float
    shift_percentiles: Percentiles
    worst: tuple[WorstToken, ...] = ()


@dataclass(frozen=True)
class CacheRow:
    """The child under a quantized KV cache: ``alone`` beside itself with a wide cache, ``gap`` beside the parent.
    ``clipped`` is the share of keys and values that the scales could not hold; without ``perplexity`` the run gave NaN.
    """

    mode: str
    bytes_per_token: int
    clipped: float
    perplexity: Interval | None = None
    alone: Gap | None = None
    gap: Gap | None = None


@dataclass(frozen=True)
class LayerGap:
    """Hidden states behind a layer. ``cosine`` mean and least over tokens and ``relative`` = rms |child - parent| /
    rms |parent| of whole runs; ``local`` is what this layer alone makes of the parent's own input, as a share of
    what the layer adds, and ``expected`` what its format explains (None: not looked at)."""

    layer: int
    cosine: float
    least_cosine: float
    relative: float
    local: float | None = None
    expected: float | None = None


@dataclass(frozen=True)
class Part:
    """A part of a layer on the parent's own input: relative error of its output, and what its format explains."""

    name: str
    error: float
    expected: float


@dataclass(frozen=True)
class Fault:
    """A probable bug: ``where`` (a layer, the embedding, the head), its error and what its format explains, the part
    of it that parts most, and what is known of the cause."""

    where: str
    error: float
    expected: float
    part: Part | None
    said: str
    remedy: str


@dataclass(frozen=True)
class Divergence:
    """Layer by layer; ``jump`` is the first layer whose error its format cannot explain."""

    layers: tuple[LayerGap, ...]
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def jump(self) -> Fault | None:
        return self.faults[0] if self.faults else None

    @property
    def excess(self) -> float | None:
        """The largest error of a layer as a multiple of what its format explains; None where none was looked at."""
        seen = [row.local / row.expected for row in self.layers if row.local is not None and row.expected]
        return max(seen, default=None)


@dataclass(frozen=True)
class Continuation:
    """One prompt, continued by both; ``first`` is where they part (None: never), ``margin`` the parent's lead of its
    best over its second token there, in nats."""

    document: str
    prompt: str
    parent: str
    child: str
    first: int | None
    margin: float | None


@dataclass(frozen=True)
class Greedy:
    """Greedy continuations of the beginnings of documents, ``tokens`` each."""

    tokens: int
    prompt_tokens: int
    matching: int
    rows: tuple[Continuation, ...]
    median_first: float | None


@dataclass(frozen=True)
class RetrievalCell:
    """Tasks of one length and depth: how many each model solved, of ``tasks`` with ``choices`` answers."""

    length: int
    depth: float
    tasks: int
    parent: int | None
    child: int


@dataclass(frozen=True)
class Retrieval:
    """A fact hidden in filler, asked for at the end, scored against the other answers."""

    choices: int
    cells: tuple[RetrievalCell, ...]
    says: str


@dataclass(frozen=True)
class Structured:
    """How many outputs are JSON, and fit the schema, of ``prompts``."""

    prompts: int
    parent_json: int | None
    child_json: int
    parent_valid: int | None
    child_valid: int
    says: str
    example: str


@dataclass(frozen=True)
class Sums:
    """One linear's sampled sums under an accumulator. ``error`` is the largest over outputs, as a share of Σ|x|·|w|;
    ``noise`` the root mean square error as a share of the outputs' own; ``worst`` bounds ``error``; ``likely`` is what
    unbiased rounding would stay below, where the accumulator has a model. ``said`` is why nothing was computed, and
    then the numbers are None."""

    name: str
    how: str
    k: int
    steps: int = 0
    error: float | None = None
    noise: float | None = None
    worst: float | None = None
    likely: float | None = None
    said: str = ""


@dataclass(frozen=True)
class Clipped:
    """A linear whose stored input scale could not hold ``share`` of the inputs that it saw."""

    name: str
    share: float


@dataclass(frozen=True)
class Asked:
    """Limits that the caller set: the mean KL that is allowed, the top-1 agreement that is wanted."""

    max_kl: float | None = None
    min_top1: float | None = None


@dataclass(frozen=True)
class Verdict:
    """One word for programs, one sentence for people, and the exit code."""

    says: Says
    sentence: str
    code: int


@dataclass(frozen=True)
class Evaluation:
    """Everything that one evaluation found."""

    text: Text
    child: Side
    parent: Side | None = None
    gap: Gap | None = None
    caches: tuple[CacheRow, ...] = ()
    divergence: Divergence | None = None
    greedy: Greedy | None = None
    retrieval: Retrieval | None = None
    structured: Structured | None = None
    sums: tuple[Sums, ...] = ()
    clipped: tuple[Clipped, ...] = ()
    asked: Asked = field(default_factory=Asked)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        if self.gap is None:
            sentence = f"perplexity {self.child.perplexity.estimate:.4g}; no parent to compare it with"
            return Verdict("measured", sentence, 0)
        said = _verdict(self.gap, self.asked)
        faults = self.divergence.faults if self.divergence is not None else ()
        if not faults:
            return said
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        return Verdict("probable bug", f"a probable bug in {faults[0].where}{more}; {said.sentence}", 1)

    @property
    def code(self) -> int:
        """The exit code: 1 for limits that are broken and for a probable bug."""
        return self.verdict.code

    def to_json(self) -> dict[str, Any]:
        """Plain numbers under stable keys."""
        found = asdict(self)
        return found | {"verdict": asdict(self.verdict), "exit_code": self.code}


def _verdict(gap: Gap, asked: Asked) -> Verdict:
    if gap.identical:
        return Verdict("identical", "identical: every logit is equal to the parent's, bit for bit", 0)
    limits = [
        ("mean KL", gap.kl, asked.max_kl, 1),
        ("top-1 agreement", gap.top1, asked.min_top1, -1),
    ]
    said = [
        _within(name, interval, limit, sign) for name, interval, limit, sign in limits if limit is not None
    ]
    if said:
        return max(said, key=lambda verdict: (0, 4, 1).index(verdict.code))
    change = gap.perplexity
    distance = f"the predictions are {gap.kl.estimate:.3g} nats apart (KL)"
    if change.low <= 0 <= change.high:
        said = f"this text does not tell the perplexity from the parent's: {_changed(change)}; {distance}"
        return Verdict("measured", said, 0)
    worse = "worse" if change.estimate > 0 else "better"
    return Verdict("measured", f"perplexity {worse} than the parent's: {_changed(change)}; {distance}", 0)


def _within(name: str, interval: Interval, limit: float, sign: int) -> Verdict:
    """Whether an interval lies on the right side of a limit, across it, or beyond it."""
    ends = sorted((sign * interval.low, sign * interval.high))
    spread = f"{name} {interval.estimate:.4g}, interval {interval.low:.4g} to {interval.high:.4g}"
    bound = f"{'at most' if sign > 0 else 'at least'} {limit:g} was asked for"
    if ends[1] <= sign * limit:
        return Verdict("fine", f"as good as asked: {spread}; {bound}", 0)
    if ends[0] > sign * limit:
        return Verdict("worse", f"worse than asked: {spread}; {bound}", 1)
    return Verdict("undecided", f"undecided: {spread}; {bound}; more documents narrow the interval", 4)


def _changed(change: Interval) -> str:
    if change.high == inf:
        return f"{100 * change.estimate:+.2f} %, no interval from one document"
    return f"{100 * change.estimate:+.2f} %, interval {100 * change.low:+.2f} to {100 * change.high:+.2f} %"
