"""What two models' answers to the same questions say: better, worse, no difference shown, undecided, or invalid.

    A is the parent or baseline, B the quantized model;  d = B's mean score - A's, over n questions

    invalid              the two were not asked the same, or an answer is no number: nothing is compared
    worse                d < 0 and p <= α;  or of several tasks one is, p adjusted for their number (Holm)
    better               d > 0 and p <= α, and no task is worse
    no difference shown  the interval of d at confidence 1 - α lies within ± effect
    undecided            anything else: these questions can show neither a difference nor its absence

taken in that order. p is McNemar's exact one where answers are right or wrong and questions are independent, else that
of the sign-flip test over questions or clusters. The interval is Tango's for right and wrong, the bootstrap over
questions for scores between; with clusters the bootstrap over clusters, and never narrower than Tango's. The effect is
the smallest change that matters, 2 points unless said otherwise: GSM8K's 1319 questions with 58 flips, which balance,
can show that no change of 2 points is there, and cannot show it of 1 point.

Two runs whose every response is the same, or one file given twice, differ by exactly 0 with certainty.

Left out: sequential looks at growing files (an evaluation has an end; counters of production have none, see
verdict_counters), and pooling of tasks as if they were drawn from more tasks (``cluster="task"`` asks for that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.statistics.bootstrap import Interval, by_cluster, ratio_interval, standard_error
from narrowcast.statistics.mcnemar import exact_p, mid_p, score_interval
from narrowcast.statistics.power import detectable, detectable_mean, mean_needed, questions_needed
from narrowcast.statistics.proportions import holm
from narrowcast.statistics.quantiles import normal_quantile
from narrowcast.statistics.signflip import sign_flip_p
from narrowcast.studies.verdict_answers import Answers, Asked, aligned, read
from narrowcast.studies.verdict_pairs import Pair, Refusal, metric_of, paired, unscored

EFFECT, LEAST = 0.02, 1e-9  # the questions that an effect needs grow with its inverse square
_Doubles = NDArray[np.float64]


class Reading(StrEnum):
    """The five verdicts."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference shown"
    UNDECIDED = "undecided"
    INVALID = "invalid"

    @property
    def exit_code(self) -> int:
        """0 for better and no difference shown, 1 for worse, 4 for undecided and invalid."""
        return {Reading.WORSE: 1, Reading.UNDECIDED: 4, Reading.INVALID: 4}.get(self, 0)


@dataclass(frozen=True)
class Row:
    """One task, or all together. Scores, differences and effects are shares of 1.

    ``lost`` and ``gained`` count questions that B answers worse and better than A; ``flips`` is their share.
    ``bootstrap`` resamples clusters or questions; ``interval`` is what the verdict goes by. ``mid_p`` is there where
    McNemar's test is, ``adjusted_p`` where there are several tasks. ``detectable`` is the smallest change that these
    questions show with 80 % power and ``needed`` how many show the effect; ``unpaired`` is the half width that the
    interval would have if the two had not answered the same questions.
    """

    task: str
    metric: str
    questions: int
    clusters: int | None
    binary: bool
    a: float
    b: float
    lost: int
    gained: int
    interval: Interval
    bootstrap: Interval
    p: float
    mid_p: float | None
    detectable: float
    needed: int | None
    unpaired: float
    adjusted_p: float | None = None

    @property
    def difference(self) -> float:
        return self.interval.estimate

    @property
    def flips(self) -> float:
        return (self.lost + self.gained) / self.questions

    def to_json(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return shown | {
            "difference": self.difference,
            "flips": self.flips,
            "interval": self.interval.to_json(),
            "bootstrap": self.bootstrap.to_json(),
        }


@dataclass(frozen=True)
class Verdict:
    """The verdict with everything that it rests on; ``whole`` is None when it is invalid."""

    reading: Reading
    paths: tuple[str, str]
    whole: Row | None
    tasks: tuple[Row, ...]
    refusals: tuple[Refusal, ...]
    effect: float
    confidence: float
    same: bool = False
    notes: tuple[str, ...] = ()

    @property
    def worse_tasks(self) -> tuple[Row, ...]:
        return tuple(row for row in self.tasks if _shown(row, self.confidence) and row.difference < 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.reading.value,
            "exit_code": self.reading.exit_code,
            "paths": list(self.paths),
            "effect": self.effect,
            "confidence": self.confidence,
            "same_answers": self.same,
            "whole": None if self.whole is None else self.whole.to_json(),
            "tasks": [row.to_json() for row in self.tasks],
            "worse_tasks": [row.task for row in self.worse_tasks],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "notes": list(self.notes),
        }


def verdict(
    a: str | Path,
    b: str | Path,
    *,
    effect: float = EFFECT,
    confidence: float = 0.95,
    metric: str | None = None,
    filter: str | None = None,
    cluster: str | None = None,
    k: int = 1,
) -> Verdict:
    """Judge model B by its answers against those of A: files or directories of lm-eval samples, pass@k records or plain
    JSON lines (see verdict_answers).

        narrowcast.verdict("parent/samples_gsm8k_....jsonl", "quantized/samples_gsm8k_....jsonl").reading

    ``cluster`` is a field that questions share which are not independent (of the line, or of lm-eval's doc; or "task").
    ``metric`` (or several with commas: the first that a task has), ``filter`` and ``k`` choose among the scores that
    the files hold. Raises UsageError for what cannot be asked, InputError for files that hold something else.
    """
    _check(effect, confidence, k)
    asked = Asked(metric, filter, cluster, k)
    sides = aligned(read(a, asked), read(b, asked))
    pairs, refusals = paired(*sides)
    by_task: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_task.setdefault(pair.a.task, []).append(pair)
    chosen = {task: metric_of(task, those, *sides, metric) for task, those in by_task.items()}
    metrics = {task: name for task, (name, _) in chosen.items()}
    refusals += unscored(metrics, pairs)
    paths = (sides[0].path, sides[1].path)
    if refusals:
        return Verdict(Reading.INVALID, paths, None, (), tuple(refusals), effect, confidence)
    notes = [note for task, (name, others) in chosen.items() for note in _choices(task, name, others, sides)]
    same = _same(sides, pairs)
    rows = [_row(task, metrics, those, effect, confidence, same) for task, those in by_task.items()]
    whole, tasks = rows[0], tuple[Row, ...]()
    if len(rows) > 1:
        whole = _row("all", metrics, pairs, effect, confidence, same)
        adjusted = holm([row.p for row in rows])
        tasks = tuple(replace(row, adjusted_p=p) for row, p in zip(rows, adjusted, strict=True))
    judged = Verdict(Reading.UNDECIDED, paths, whole, tasks, (), effect, confidence, same, tuple(notes))
    return replace(judged, reading=_reading(judged, whole))


def _check(effect: float, confidence: float, k: int) -> None:
    if not LEAST <= effect < 1:
        raise UsageError(
            "an effect is a change of a share",
            got=effect,
            wanted=f"from {LEAST:g} to below 1, 0.02 for 2 points",
        )
    if k < 1:
        raise UsageError("pass@k counts samples", got=f"k = {k}", wanted="1 or more")
    if not 0.5 <= confidence < 1:
        raise UsageError("not a confidence", got=confidence, wanted="from 0.5 to below 1, such as 0.95")


def _reading(judged: Verdict, whole: Row) -> Reading:
    worse = _shown(whole, judged.confidence) and whole.difference < 0
    if worse or judged.worse_tasks:
        return Reading.WORSE
    if _shown(whole, judged.confidence):
        return Reading.BETTER
    return Reading.NO_DIFFERENCE if whole.interval.within(judged.effect) else Reading.UNDECIDED


def _shown(row: Row, confidence: float) -> bool:
    """Whether a difference is shown at level 1 - ``confidence``; the slack is the rounding of that subtraction."""
    p = row.p if row.adjusted_p is None else row.adjusted_p
    return p <= (1 - confidence) * (1 + 1e-12) and row.difference != 0


def _same(sides: tuple[Answers, Answers], pairs: Sequence[Pair]) -> bool:
    files = [[file.resolve() for file in side.files] for side in sides]
    return files[0] == files[1] or all(
        p.a.reply is not None and p.a.reply == p.b.reply and p.a.scores == p.b.scores for p in pairs
    )


def _choices(task: str, metric: str, others: Sequence[str], sides: tuple[Answers, Answers]) -> list[str]:
    where = f" of {task}" if task else ""
    said = []
    if others:
        said.append(f"judged by {metric}{where}; --metric chooses among {', '.join((metric, *others))}")
    filters = [side.filters.get(task, ()) for side in sides]
    if filters[0][:1] != filters[1][:1]:
        raise UsageError(
            f"the filters{where} differ",
            got=f"{filters[0]} and {filters[1]}",
            remedy="name one with --filter",
        )
    if len(filters[0]) > 1:
        said.append(f"filter {filters[0][0]}{where}; --filter chooses among {', '.join(filters[0])}")
    return said


def _row(
    task: str, metrics: Mapping[str, str], pairs: Sequence[Pair], effect: float, confidence: float, same: bool
) -> Row:
    names = [metrics[pair.a.task] for pair in pairs]
    a = np.array([pair.a.scores[name] for pair, name in zip(pairs, names, strict=True)])
    b = np.array([pair.b.scores[name] for pair, name in zip(pairs, names, strict=True)])
    codes = _clusters(pairs)
    d, n = b - a, len(pairs)
    grouped = by_cluster(d, codes)
    binary = bool(np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all())
    lost, gained = int((d < 0).sum()), int((d > 0).sum())
    clustered = len(grouped[0]) < n
    independent = binary and not clustered
    boot = _bounded(ratio_interval(*grouped, confidence=confidence))
    error, ratio = _errors(d, grouped, codes)
    z = normal_quantile((1 + confidence) / 2)
    apart = z * sqrt(standard_error(*by_cluster(a, codes)) ** 2 + standard_error(*by_cluster(b, codes)) ** 2)
    least, needed = _power(n, (lost + gained) / n, binary, error, ratio, effect, confidence)
    return Row(
        task,
        ", ".join(dict.fromkeys(names)),
        n,
        len(grouped[0]) if clustered else None,
        binary,
        float(a.mean()),
        float(b.mean()),
        lost,
        gained,
        _interval(boot, lost, gained, n, binary, clustered, same),
        boot,
        exact_p(lost, gained) if independent else sign_flip_p(grouped[0]),
        mid_p(lost, gained) if independent else None,
        least,
        needed,
        min(1.0, apart),
    )


def _clusters(pairs: Sequence[Pair]) -> NDArray[np.integer]:
    """A number for each question's cluster; questions without one are each their own."""
    numbers: dict[Any, int] = {}
    keys = [
        (pair.a.task, pair.a.cluster) if pair.a.cluster is not None else (pair.a.task, pair.a.id, "alone")
        for pair in pairs
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _interval(
    boot: Interval, lost: int, gained: int, n: int, binary: bool, clustered: bool, same: bool
) -> Interval:
    if same:
        return replace(boot, estimate=0.0, low=0.0, high=0.0, method="identical")
    if not binary and lost + gained:
        return boot
    score = score_interval(lost, gained, n, boot.confidence)
    if not clustered:
        return score
    low, high = min(boot.low, score.low), max(boot.high, score.high)
    return replace(boot, low=low, high=high)


def _bounded(interval: Interval) -> Interval:
    """Scores are from 0 to 1, so their difference is from -1 to 1."""
    return replace(interval, low=max(-1.0, interval.low), high=min(1.0, interval.high))


def _errors(
    d: _Doubles, grouped: tuple[_Doubles, _Doubles], codes: NDArray[np.integer]
) -> tuple[float, float]:
    """The standard error of the mean difference, and how many times clusters widen its square (at least 1)."""
    error, alone = standard_error(*grouped), standard_error(d, np.ones_like(d))
    if not (isfinite(error) and isfinite(alone) and alone > 0):
        return error, 1.0
    return error, max(1.0, (error / alone) ** 2)


def _power(
    n: int, flips: float, binary: bool, error: float, ratio: float, effect: float, confidence: float
) -> tuple[float, int | None]:
    """The smallest change that shows, and the questions that show the effect. Without any flip up to 3/n of answers may
    flip (the 95 % bound of a share of which none of n was seen)."""
    if binary or not flips:
        share = flips or min(1.0, 3 / n)
        return (
            detectable(n, share, confidence, design=ratio),
            questions_needed(effect, share, confidence, design=ratio),
        )
    if not isfinite(error):
        return 1.0, None
    return min(1.0, detectable_mean(error, confidence)), mean_needed(effect, n * error**2, confidence)
