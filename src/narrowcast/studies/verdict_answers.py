"""Answers of one model to questions, read from the files that evaluations leave behind.

    lm-eval    samples_TASK_DATE.jsonl of --log_samples: doc_id, metrics by name, hashes, arguments, resps, filter
    pass@k     task_id and passed, a line per sample or a list: one question scored by the unbiased estimator
    plain      id and score (or correct), and what else is known: task, document, prompt, token_ids, logprobs

A line of any of them becomes an ``Answer``: its scores, and digests of what has to be the same for both models to be
compared at all. Long prompts are kept as digests only, so that memory is that of the scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowcast.errors import InputError, UsageError
from narrowcast.statistics.proportions import pass_at_k
from narrowcast.studies.verdict_fields import (
    LOGPROBS,
    cluster_of,
    digest,
    doubled,
    facts_of,
    is_lm_eval,
    nonfinite,
    scores_of,
    token_ids,
)  # fmt: skip

_IDS = ("id", "question_id", "doc_id", "task_id")
_NAMED = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[.\d]*)\.jsonl")


@dataclass(frozen=True)
class Answer:
    """One model's answer to one question; ``facts`` are digests or words by what they are of."""

    task: str
    id: str
    where: str
    scores: Mapping[str, float]
    cluster: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None
    doubled: str = ""
    nonfinite: str = ""
    reply: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.id

    @property
    def name(self) -> str:
        return f"{self.task} {self.id}" if self.task else self.id

    @property
    def line(self) -> str:
        """The file's name and the line."""
        return Path(self.where).name


@dataclass(frozen=True)
class Answers:
    """All answers of one side, the files they came from, and of each task the filters that were passed over and the
    metrics of which less is better."""

    path: str
    files: tuple[Path, ...]
    answers: tuple[Answer, ...]
    filters: Mapping[str, tuple[str, ...]]
    lower: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Asked:
    """What of the files is wanted: a metric, lm-eval's filter, the field that clusters questions, k of pass@k."""

    metric: str | None = None
    filter: str | None = None
    cluster: str | None = None
    k: int = 1


def read(source: str | Path, asked: Asked) -> Answers:
    """The answers in ``source``: a file, a directory (lm-eval's, or one of .jsonl files), or several with commas.

    Raises InputError for files that are not there or hold something else, UsageError for a filter, field or k that
    they do not have.
    """
    files = _files(str(source))
    tasks = [_task(file, alone=len(files) == 1) for file in files]
    twice = next((task for task in tasks if tasks.count(task) > 1), None)
    if twice is not None:
        both = ", ".join(str(file) for file, task in zip(files, tasks, strict=True) if task == twice)
        raise InputError(
            f"the task {twice} is there more than once",
            got=both,
            remedy="name the file of the run that counts",
        )
    answers: list[Answer] = []
    filters: dict[str, tuple[str, ...]] = {}
    lower: set[tuple[str, str]] = set()
    for file, task in zip(files, tasks, strict=True):
        shots, less = _beside(file, task)
        lower |= {(task, metric) for metric in less}
        found, filters[task] = _of_file(file, task, shots, asked)
        answers += found
    if not answers:
        raise InputError("no answers", where=source, wanted="one JSON object per line")
    if asked.k != 1 and not any(f"pass@{asked.k}" in answer.scores for answer in answers):
        raise UsageError("no answer was sampled several times", where=source, got=f"k = {asked.k}")
    if asked.filter is not None and all(asked.filter not in names[:1] for names in filters.values()):
        known = sorted({name for names in filters.values() for name in names})
        raise UsageError(
            "no answer has this filter", got=asked.filter, wanted=", ".join(known) or "no filter"
        )
    return Answers(str(source), tuple(files), tuple(answers), filters, frozenset(lower))


def aligned(a: Answers, b: Answers) -> tuple[Answers, Answers]:
    """Both sides, the one task of either under its name where the other's file does not say one."""
    tasks = [{answer.task for answer in side.answers} for side in (a, b)]
    if tasks[0] == {""} and len(tasks[1]) == 1:
        return _renamed(a, *tasks[1]), b
    if tasks[1] == {""} and len(tasks[0]) == 1:
        return a, _renamed(b, *tasks[0])
    return a, b


def _renamed(side: Answers, task: str) -> Answers:
    answers = tuple(replace(answer, task=task) for answer in side.answers)
    return replace(side, answers=answers, filters={task: side.filters.get("", ())})


def _files(source: str) -> list[Path]:
    if not Path(source).exists() and "," in source:
        return [file for part in source.split(",") for file in _files(part.strip())]
    path = Path(source)
    if source and path.is_dir():
        files = sorted(path.rglob("samples_*.jsonl")) or sorted(path.rglob("*.jsonl"))
        if not files:
            raise InputError(
                "the directory has no .jsonl file",
                where=path,
                remedy="lm-eval writes them with --log_samples",
            )
        return files
    if not source or not path.is_file():
        raise InputError("no such file", where=source or "an empty name")
    return [path]


def _task(file: Path, alone: bool) -> str:
    named = _NAMED.fullmatch(file.name)
    return named["task"] if named else "" if alone else file.stem


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object with the place where it stands."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", _object(line, f"{file}:{number}")
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8 text", where=file, got=f"byte {error.start}") from None
    except OSError as error:
        raise InputError("the file cannot be read", where=file, got=error.strerror) from None


def _object(line: str, where: str) -> dict[str, Any]:
    wanted = "one JSON object per line"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError("not JSON", where=where, got=said, wanted=wanted) from None
    if not isinstance(found, dict):
        raise InputError("not a JSON object", where=where, got=type(found).__name__, wanted=wanted)
    return found


def _beside(file: Path, task: str) -> tuple[str | None, list[str]]:
    """The number of few-shot examples of an lm-eval task and its metrics of which less is better, from the results
    that lie beside its samples."""
    named = _NAMED.fullmatch(file.name)
    results = file.with_name(f"results_{named['date']}.json") if named else None
    if results is None or not results.is_file():
        return None, []
    try:
        found = json.loads(results.read_bytes())
        shots = found.get("n-shot", {}).get(task)
        better = found.get("higher_is_better", {}).get(task) or {}
        return (None if shots is None else str(shots)), [
            name for name, high in better.items() if high is False
        ]
    except (ValueError, AttributeError, OSError) as error:
        raise InputError("the results beside the samples cannot be read", where=results, got=error) from None


_Placed = Sequence[tuple[str, dict[str, Any]]]


def _of_file(file: Path, task: str, shots: str | None, asked: Asked) -> tuple[list[Answer], tuple[str, ...]]:
    """The answers of one filter (the wanted one, else the first), and all filters with that one in front."""
    by_filter: dict[str, list[Answer]] = {}
    samples: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for where, record in _records(file):
        harness = is_lm_eval(record)
        own = task if harness else str(record.get("task", task))
        if "task_id" in record and ("passed" in record or "completion" in record):
            samples.setdefault((own, str(record["task_id"])), []).append((where, record))
            continue
        name = str(record.get("filter", "")) if harness else ""
        by_filter.setdefault(name, []).append(_answer(where, record, own, shots, asked))
    names = [name for name in by_filter if name]
    chosen = asked.filter if asked.filter in names else names[0] if names else ""
    kept = by_filter.get(chosen, []) + (by_filter.get("", []) if chosen else [])
    kept += [_sampled(own, name, lines, asked) for (own, name), lines in samples.items()]
    return kept, (chosen, *(name for name in names if name != chosen)) if names else ()


def _sampled(task: str, name: str, lines: _Placed, asked: Asked) -> Answer:
    """A question that was answered several times: pass@k of its samples."""
    passed: list[Any] = []
    for where, record in lines:
        found = record.get("passed")
        if found is None:
            raise InputError(
                "a sample has no result", where=where, got="no `passed`", remedy="run the tests first"
            )
        passed += found if isinstance(found, list) else [found]
    if not all(isinstance(value, bool | int) and value in (0, 1) for value in passed):
        raise InputError("`passed` is not true or false", where=lines[0][0], got=lines[0][1].get("passed"))
    if len(passed) < asked.k:
        raise UsageError(
            f"pass@{asked.k} needs {asked.k} samples of each question", where=lines[0][0], got=len(passed)
        )
    where, first = lines[0]
    replies = [record.get("completion") for _, record in lines]
    return Answer(
        task,
        name,
        where,
        {f"pass@{asked.k}": pass_at_k(len(passed), sum(map(int, passed)), asked.k)},
        cluster_of(first, task, asked.cluster, where),
        facts_of(first, None),
        reply=None if None in replies else digest(replies),
    )


def _answer(where: str, record: Mapping[str, Any], task: str, shots: str | None, asked: Asked) -> Answer:
    name = next((record[key] for key in _IDS if key in record), None)
    if isinstance(name, dict | list | float) or name is None:
        raise InputError(
            "an answer without an id",
            where=where,
            got=", ".join(record)[:200],
            wanted="one of " + ", ".join(_IDS),
        )
    reply = record.get(
        "resps", [record[key] for key in ("response", "output", *LOGPROBS) if key in record] or None
    )
    return Answer(
        task,
        str(name),
        where,
        scores_of(record, asked.metric),
        cluster_of(record, task, asked.cluster, where),
        facts_of(record, shots),
        token_ids(record),
        doubled(record),
        nonfinite(record),
        None if reply is None else digest(reply),
    )
