"""Whether two models' answers can be compared at all, and as pairs if they can.

A score of A and one of B are a pair when both models were asked the same: the same question, the same prompt down to
the token, the same number of examples before it and the same settings. Whatever differs there makes the difference of
the scores mean something else, and no statistic mends that; so it is counted, its first place is named, and nothing is
compared. What only one side's files say cannot be checked and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from narrowcast.errors import InputError, UsageError
from narrowcast.studies.verdict_answers import Answer, Answers
from narrowcast.studies.verdict_fields import SCORES


@dataclass(frozen=True)
class Refusal:
    """Why nothing was compared: what was found, how often, where first, and what to do."""

    reason: str
    said: str
    count: int
    first: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Pair:
    """Both answers to one question."""

    a: Answer
    b: Answer


_SAME_RUN = "evaluate both with one version, template and tokenizer"
_FACTS: tuple[tuple[str, str, str], ...] = (
    ("shots", "the number of few-shot examples differs", "evaluate both with the same --num_fewshot"),
    ("question", "one id, two different questions", "evaluate both on one version of the data"),
    ("target", "one question, two different right answers", "evaluate both on one version of the data"),
    ("prompt", "the prompts differ", _SAME_RUN),
    ("request", "what the model was asked differs", _SAME_RUN),
    ("settings", "the generation settings differ", "evaluate both with the same settings"),
)


def paired(a: Answers, b: Answers) -> tuple[list[Pair], list[Refusal]]:
    """The pairs in A's order, and all that forbids to compare them."""
    refusals = [*_duplicates(a, "A"), *_duplicates(b, "B")]
    of_b = {answer.key: answer for answer in b.answers}
    of_a = {answer.key: answer for answer in a.answers}
    refusals += _alone((answer for key, answer in of_a.items() if key not in of_b), "A", len(of_a))
    refusals += _alone((answer for key, answer in of_b.items() if key not in of_a), "B", len(of_b))
    pairs = [Pair(answer, of_b[key]) for key, answer in of_a.items() if key in of_b]
    refusals += _differing(pairs)
    for side, answers in (("A", a.answers), ("B", b.answers)):
        refusals += [*_doubled(answers, side), *_nonfinite(answers, side)]
    refusals += _tokens(pairs)
    return pairs, refusals


def _duplicates(found: Answers, side: str) -> list[Refusal]:
    seen: dict[tuple[str, str], Answer] = {}
    twice = [(seen[x.key], x) for x in found.answers if seen.setdefault(x.key, x) is not x]
    if not twice:
        return []
    first = f"{twice[0][1].name}: {twice[0][0].line} and {twice[0][1].line}"
    remedy = "keep one answer per id; samples of one question are pass@k records (task_id, passed)"
    return [Refusal("duplicate", f"{side} answers a question more than once", len(twice), first, remedy)]


def _alone(answers: Iterable[Answer], side: str, total: int) -> list[Refusal]:
    alone = list(answers)
    if not alone:
        return []
    all_of = "all" if len(alone) == total else f"{len(alone)} of {total}"
    remedy = "evaluate both on the same questions (the same --limit and version of the data)"
    return [
        Refusal(
            "unpaired",
            f"{all_of} questions of {side} are not in the other",
            len(alone),
            alone[0].name,
            remedy,
        )
    ]


def _differing(pairs: Sequence[Pair]) -> list[Refusal]:
    refusals: list[Refusal] = []
    for fact, said, remedy in _FACTS:
        found = [
            p for p in pairs if fact in p.a.facts and fact in p.b.facts and p.a.facts[fact] != p.b.facts[fact]
        ]
        if not found or (fact == "request" and refusals and refusals[-1].reason == "prompt"):
            continue
        first = f"{found[0].a.name} (A {found[0].a.line}, B {found[0].b.line})"
        if fact == "shots":
            first = f"{found[0].a.facts[fact]} in A, {found[0].b.facts[fact]} in B: {first}"
        refusals.append(Refusal(fact, said, len(found), first, remedy))
    return refusals


def _doubled(answers: Sequence[Answer], side: str) -> list[Refusal]:
    """A beginning-of-text token that is there twice: in the text, or as the two equal ids that begin every answer."""
    remedy = "the chat template writes one and the tokenizer adds one: turn either off"
    said = f"the prompts of {side} begin with two beginning-of-text tokens"
    texts = [answer for answer in answers if answer.doubled]
    if texts:
        return [Refusal("double_bos", said, len(texts), f"{texts[0].doubled} twice: {texts[0].line}", remedy)]
    begins = {answer.tokens[:2] for answer in answers if answer.tokens is not None}
    begin = next(iter(begins)) if len(begins) == 1 else ()
    if len(begin) < 2 or begin[0] != begin[1]:
        return []
    tokenized = [answer for answer in answers if answer.tokens is not None]
    return [Refusal("double_bos", said, len(tokenized), f"id {begin[0]} twice: {tokenized[0].line}", remedy)]


def _tokens(pairs: Sequence[Pair]) -> list[Refusal]:
    found = [
        p for p in pairs if p.a.tokens is not None and p.b.tokens is not None and p.a.tokens != p.b.tokens
    ]
    if not found:
        return []
    a, b = found[0].a.tokens or (), found[0].b.tokens or ()
    for side, longer, shorter in (("A", a, b), ("B", b, a)):
        if longer[1:] == shorter:
            how = f"{side} has one more in front, id {longer[0]} (an extra beginning-of-text token)"
            break
    else:
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        how = f"from place {at} on, {len(a)} ids in A, {len(b)} in B"
    first = f"{found[0].a.name}: {how}"
    return [
        Refusal("tokens", "the token ids differ", len(found), first, "compare models on the same token ids")
    ]


def _nonfinite(answers: Sequence[Answer], side: str) -> list[Refusal]:
    found = [answer for answer in answers if answer.nonfinite]
    if not found:
        return []
    remedy = (
        "a model that gives NaN or infinity is broken: mend it before it is judged (narrowcast trace, audit)"
    )
    first = f"{found[0].nonfinite}: {found[0].name} ({found[0].line})"
    return [Refusal("nonfinite", f"log-probs of {side} are not finite", len(found), first, remedy)]


def metric_of(
    task: str, pairs: Sequence[Pair], a: Answers, b: Answers, wanted: str | None
) -> tuple[str, list[str]]:
    """The metric that a task is judged by, and those that would do as well: the wanted one, else the first that every
    answer of both sides has as a number from 0 to 1.

    Raises UsageError for a wanted metric that is not there or of which less is better, InputError when there is none.
    """
    answers = [answer for pair in pairs for answer in (pair.a, pair.b)]
    known = list(dict.fromkeys(name for answer in answers for name in answer.scores))
    less = {name for name in known if (task, name) in a.lower | b.lower}
    where = task or a.path
    if wanted is not None:
        asked = wanted
        wanted = next((name for name in asked.split(",") if name in known), None)
        if wanted is None:
            raise UsageError(
                "no answer has this metric", where=where, got=asked, wanted=", ".join(known) or None
            )
        if wanted in less:
            raise UsageError(
                "less is better in this metric, and a verdict wants a score", where=where, got=wanted
            )
        outside = next((x for x in answers if not _fits(x.scores.get(wanted))), None)
        if outside is not None:
            got = f"{wanted} {outside.scores[wanted]:g}"
            raise InputError("a score is not between 0 and 1", where=outside.where, got=got)
        return wanted, []
    fit = [n for n in known if n not in less and all(_fits(x.scores.get(n)) for x in answers)]
    if not fit:
        wanted_names = ", ".join(SCORES)
        raise InputError(
            "no answer has a score between 0 and 1", where=where, wanted=f"{wanted_names}, or --metric"
        )
    whole = [name for name in fit if all(name in x.scores for x in answers)] or fit
    return whole[0], [name for name in fit if name != whole[0]]


def _fits(value: float | None) -> bool:
    """From 0 to 1; one that is missing or not finite makes the comparison invalid, not the metric unfit."""
    return value is None or not isfinite(value) or 0 <= value <= 1


def unscored(metrics: Mapping[str, str], pairs: Sequence[Pair]) -> list[Refusal]:
    """Answers whose score is missing or not finite."""
    found = []
    for side, answers in (("A", [p.a for p in pairs]), ("B", [p.b for p in pairs])):
        bad = [x for x in answers if not isfinite(x.scores.get(metrics[x.task], float("nan")))]
        if bad:
            metric = metrics[bad[0].task]
            first = f"{metric} {bad[0].scores.get(metric, 'is missing')}: {bad[0].name} ({bad[0].line})"
            said = f"scores of {side} are missing or not finite"
            found.append(Refusal("score", said, len(bad), first, "every answer needs its score"))
    return found
