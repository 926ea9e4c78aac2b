"""Which preset for this model on this GPU: ranked, with the reasons in words.

    runs       before what is emulated, and that before what was measured as too bad, does not fit, or is refused
    natively   products in the preset's own precision before those that widen the weights first
    floor      the lower bound of a decode step at the batch and context that are asked; within 5 % of each other
               they are ties, since no kernel keeps its floor that closely
    ties       by measured KL where all of them are measured, else the wider first: bits of the weights, of the inputs,
               then the order of the presets' table, in which finer scales come first

The widest of a tie is first because it costs nothing to be nearer to the parent. Quality that was not measured is said
to be so: bits tell how near a format can be, never how near this model is.

Left out: weighing speed against quality in one number, which only the user's task can do. ``Choice.careful`` is the
first option that keeps eight bits or was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from narrowcast.hardware.cost import floor
from narrowcast.hardware.engines.row import EMULATED, UNKNOWN
from narrowcast.serving.evaluations import Quality
from narrowcast.serving.memory import memory
from narrowcast.serving.paths import Kernels, kernels
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.splits import stopped
from narrowcast.serving.steps import arithmetic, attention_arithmetic
from narrowcast.serving.traffic import decode, prefill
from narrowcast.tensors.presets import Preset, presets

TIE = 0.05  # floors this close are not told apart
NEAR_BITS = 8  # weights and inputs of at least so many bits usually cost little (docs/quality.md)
Runs = Literal["natively", "weight only", "mixed", "emulated", "refused", "unknown"]
# Tiers in their order; within one, floors decide.
_RANKS: Mapping[Runs, int] = {
    "natively": 0,
    "mixed": 0,
    "weight only": 1,
    "unknown": 2,
    "emulated": 3,
    "refused": 6,
}
_MEASURED_WORSE, _TOO_LARGE = 4, 5


@dataclass(frozen=True)
class Option:
    """One preset: what runs, whether it fits, lower bounds in seconds of a decode step and of a prefill, tokens that
    fit, bytes of all weights, its quality where it was measured, and the modes of the cache with which the batch fits.
    ``rank`` counts from 1; ties share it."""

    preset: str
    runs: Runs
    arithmetic: str
    kernel: str
    fits: bool | None
    decode: float | None
    prefill: float | None
    tokens: int | None
    nbytes: int
    quality: Quality | None
    refusal: str | None = None
    caches: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    rank: int = 0

    @property
    def runnable(self) -> bool:
        """Whether it runs on a kernel of its own, and no evaluation speaks against it."""
        worse = self.quality is not None and self.quality.worse
        return self.runs not in ("refused", "emulated") and not worse

    @property
    def served(self) -> bool:
        """Whether it can be taken: it is runnable, and it fits."""
        return self.runnable and self.fits is not False

    def to_json(self) -> dict[str, Any]:
        """Numbers and words under stable keys."""
        return dict(vars(self)) | {"quality": self.quality.to_json() if self.quality is not None else None}


@dataclass(frozen=True)
class Choice:
    """Options in their order, the unquantized model beside them, and notes on evaluations that were not used."""

    options: tuple[Option, ...]
    wide: Option
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Option | None:
        """The best that can be taken."""
        return next((option for option in self.options if option.served), None)

    @property
    def fastest(self) -> Option | None:
        """The lowest floor of a decode step among those that can be taken."""
        known = [option for option in self.options if option.served and option.decode is not None]
        return min(known, key=lambda option: option.decode or 0.0, default=None)

    @property
    def careful(self) -> Option | None:
        """The first that can be taken without measuring more: eight bits, or measured and not found worse."""
        return next(
            (option for option in self.options if option.served and (option.quality is not None or _near(option))), None
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Options under stable keys."""
        named = {"first": self.first, "fastest": self.fastest, "careful": self.careful}
        return {
            **{key: option.preset if option is not None else None for key, option in named.items()},
            "wide": self.wide.to_json(), "options": [option.to_json() for option in self.options],
            "notes": list(self.notes),
        }  # fmt: skip


def choice(
    wide: Served,
    question: Question,
    written: Callable[[str], Served],
    names: Iterable[str] | None = None,
    evaluations: Mapping[str, Quality] | None = None,
) -> Choice:
    """Presets for an unquantized model. ``written`` gives the model as a preset would write it, ``names`` limits which
    (None: all), ``evaluations`` are measured qualities by preset."""
    found = dict(evaluations or {})
    chosen = [presets[name].name for name in names] if names is not None else list(presets)
    options = [option(written(name), question, name, found.get(name)) for name in chosen]
    unused = [
        f"{one.source} is of {name}, which is not compared here"
        for name, one in found.items()
        if name not in chosen
    ]
    return Choice(ranked(options), option(wide, question, wide.geometry.dtype, None), tuple(unused))  # fmt: skip


def option(served: Served, question: Question, name: str, quality: Quality | None) -> Option:
    """What one way of storing the model comes to."""
    rows = kernels(served, question)
    room, arithmetics = memory(served, question), arithmetic(served, question, rows)
    row, runs = _refused(rows) or deciding(rows), runs_as(rows)
    cut = stopped(served, question)
    if cut is not None:
        runs = "refused"
    if runs == "refused":
        step = prompt = None
    else:
        words = [attention_arithmetic(served, question, engine=True, prompt=each) for each in (False, True)]
        step = floor(decode(served, question, arithmetics, words[0]).work, question.gpu).seconds
        prompt = floor(prefill(served, question, arithmetics, words[1]).work, question.gpu).seconds
    return Option(
        name, runs, row.path.arithmetic, next(iter(row.path.kernels), ""), room.fits, step, prompt, room.tokens,
        served.nbytes, quality, row.path.refusal or cut, tuple(mode.mode for mode in room.modes if mode.fits),
    )  # fmt: skip


def _refused(rows: Sequence[Kernels]) -> Kernels | None:
    return next((row for row in rows if row.path.refusal is not None), None)


def ranked(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options in their order, with ranks and reasons."""
    tiers: dict[tuple[int, int], list[Option]] = {}
    for one in options:
        tiers.setdefault(_tier(one), []).append(one)
    ties = [tie for tier in sorted(tiers) for tie in _ties(tiers[tier])]
    found: list[Option] = []
    for tie in ties:
        rank = len(found) + 1
        found += [replace(one, rank=rank) for one in _within(tie)]
    return tuple(replace(one, reasons=_reasons(one, found)) for one in found)


def _tier(one: Option) -> tuple[int, int]:
    """What comes before any floor: whether it can be taken at all, then what its products are."""
    worse = one.quality is not None and one.quality.worse
    runs = _RANKS[one.runs]
    return max(runs, _TOO_LARGE if one.fits is False else 0, _MEASURED_WORSE if worse else 0), runs


def _ties(tier: Sequence[Option]) -> list[list[Option]]:
    """Options in groups whose floors are within ``TIE`` of the group's lowest; unknown floors last."""
    groups: list[list[Option]] = []
    for one in sorted(tier, key=lambda one: (one.decode is None, one.decode or 0.0)):
        lowest = groups[-1][0].decode if groups else None
        if groups and (one.decode == lowest or (lowest and one.decode and one.decode <= lowest * (1 + TIE))):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _within(tie: Sequence[Option]) -> list[Option]:
    """A tie in its order: by measured KL where all have one, else the wider first."""
    kl = {one.preset: one.quality.kl for one in tie if one.quality is not None and one.quality.kl is not None}
    if len(kl) == len(tie):
        return sorted(tie, key=lambda one: kl[one.preset])
    return sorted(tie, key=_width)


def _width(one: Option) -> tuple[float, ...]:
    """Smaller is wider: bits of weights, bits of inputs, stored input scales last, then the presets' order."""
    preset = presets[one.preset]
    weight, inputs = _bits(preset)
    return (
        -weight,
        -inputs,
        float(preset.calibrated),
        float(list(presets).index(one.preset.partition("+")[0])),
    )


def _bits(preset: Preset) -> tuple[int, int]:
    linear = preset.linear
    return linear.weight.element.bits, 16 if linear.input is None else linear.input.element.bits


def _near(one: Option) -> bool:
    return one.preset in presets and min(_bits(presets[one.preset])) >= NEAR_BITS


def _reasons(one: Option, order: Sequence[Option]) -> tuple[str, ...]:
    """Why it stands where it stands."""
    found = [_runs_words(one)]
    if one.fits is False:
        found.append("too little room for the cache")
    ties = [other.preset for other in order if other.rank == one.rank and other is not one]
    if ties and one.runs != "refused":
        found.append(f"its floor is within {TIE:.0%} of {', '.join(ties)}".replace("%", " %"))
    if one.quality is None:
        found.append("quality not measured")
    else:
        found.append(f"{'put down: ' if one.quality.worse else ''}measured: {one.quality.sentence}")
    return tuple(found)


def _runs_words(one: Option) -> str:
    if one.runs == "refused":
        return f"refused: {one.refusal}"
    if one.runs == "natively":
        return f"computes in {one.arithmetic}"
    return {
        "weight only": "small weights, widened for 16-bit products",
        "mixed": f"some layers compute in {one.arithmetic}, others widen their weights",
        "emulated": "no kernel: decoded at every step, slower than unquantized",
    }.get(one.runs, "what its kernel multiplies in is not known")


def deciding(rows: Sequence[Kernels]) -> Kernels:
    """The row that most quantized parameters are in, or most of all where none are."""

    def weight(row: Kernels) -> tuple[bool, int]:
        return row.conditions is not None, sum(group.matrix.parameters for group in row.groups)

    return max(rows, key=weight)


def runs_as(rows: Sequence[Kernels]) -> Runs:
    """What the quantized layers come to together; layers that are not quantized count only where none are."""
    asked = [row.path for row in rows if row.conditions is not None]
    if not asked:
        return "natively"
    if any(path.refusal is not None for path in asked):
        return "refused"
    if any(path.arithmetic == EMULATED for path in asked):
        return "emulated"
    low = [path.low_precision for path in asked]
    if all(low):
        return "natively"
    if any(path.arithmetic == UNKNOWN for path in asked):
        return "unknown"
    return "mixed" if any(low) else "weight only"
