"""From the lines of a start-up log to a report of what runs: ``diagnose``, or ``Reader`` while they are printed.

The log is read once, line by line; what is kept is one entry per fact and per fault, so memory does not grow with
the log. All engines' rows are tried, and those of other engines are dropped when the engine is known at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from narrowcast.doctor import (
    any_engine,
    sglang,
    tensorrt_llm,
    vllm_facts,
    vllm_kernels,
    vllm_numbers,
    vllm_refusals,
)
from narrowcast.doctor.conjunctions import CONJUNCTIONS
from narrowcast.doctor.engines import Votes, joined
from narrowcast.doctor.lines import cleaned, message
from narrowcast.doctor.report import Finding, Report, Running
from narrowcast.doctor.rows import NAMES, SEVERITIES, Complaint, Conjunction, Expected, Fact

FACTS: tuple[Fact, ...] = (*vllm_facts.FACTS, *sglang.FACTS, *tensorrt_llm.FACTS)
COMPLAINTS: tuple[Complaint, ...] = (
    *vllm_refusals.COMPLAINTS,
    *any_engine.COMPLAINTS,
    *vllm_numbers.COMPLAINTS,
    *vllm_kernels.COMPLAINTS,
    *sglang.COMPLAINTS,
    *tensorrt_llm.COMPLAINTS,
)
EXPECTED: tuple[Expected, ...] = (*vllm_facts.EXPECTED, *sglang.EXPECTED, *tensorrt_llm.EXPECTED)

# In the order of the page.
KINDS = (
    *("version", "backend", "model", "architecture", "device", "tensor parallel", "dtype", "quantization"),
    *(
        "online quantization",
        "scale format",
        "DeepGEMM scales",
        "linear kernel",
        "expert kernel",
        "expert dispatch",
    ),
    *(
        "attention",
        "KV cache dtype",
        "KV scales",
        "weights in memory",
        "memory for KV cache",
        "KV cache size",
    ),
    *("concurrency", "state"),
)

_TAIL = 60  # an exception at most this many lines from the end is how the log ends
_MOST_DETAILS = 12
_SHOWN = 300  # characters that are kept of a line
_WORDS = re.compile(r"[A-Za-z]\w*")
_NOTHING = ("none", "null", "auto", "no_quant")


def diagnose(lines: Iterable[str]) -> Report:
    """What runs and what is wrong, from the lines of one start-up log (any line ends, prefixes and versions).

    Raises InputError when no line is vLLM's, SGLang's or TensorRT-LLM's.
    """
    reader = Reader()
    for line in lines:
        reader.take(line)
    return reader.report()


@dataclass(slots=True)
class _Seen:
    row: Complaint
    texts: tuple[str, str, str]
    line: str
    first: int
    count: int = 0
    details: list[str] = field(default_factory=list)

    def finding(self) -> Finding:
        return Finding(
            self.row.name,
            self.row.severity,
            *self.texts,
            line=self.line,
            count=self.count,
            first=self.first,
            details=tuple(self.details),
        )


class Reader:
    """What was found so far; ``take`` reads one more line, ``report`` concludes, as often as it is asked."""

    def __init__(self) -> None:
        self._number = 0
        self._head = ""
        self._votes = Votes()
        self._facts: dict[tuple[str, str], tuple[tuple[str, ...], int]] = {}
        self._seen: dict[str, _Seen] = {}
        self._following: tuple[_Seen, re.Pattern[str]] | None = None
        self._ready = self._last_error = self._stopped = 0
        self._root = (0, "")
        self._rows: dict[str, list[tuple[Fact | Complaint, re.Pattern[str]]]] = {}
        rows: Iterator[Fact | Complaint] = chain(FACTS, COMPLAINTS)
        for row in rows:
            entry = (row, re.compile(row.regex))
            for word in row.words:
                self._rows.setdefault(word, []).append(entry)

    @property
    def serving(self) -> bool:
        """Whether a line said that the engine is ready for requests."""
        return self._ready > 0

    def take(self, raw: str) -> None:
        self._number += 1
        line = cleaned(raw)
        if not line or line.isspace():
            return
        self._head = self._head or line
        self._votes.line(line)
        if self._following is not None:
            self._follow(line)
        words = self._rows.keys() & set(_WORDS.findall(line))
        for row, pattern in dict.fromkeys(entry for word in words for entry in self._rows[word]):
            match = pattern.search(line)
            if match is not None:
                self._record(row, match, line)
        if "Error" in line or "Exception" in line:
            self._end(message(line).strip())
        elif ("SIG" in line or "Interrupt" in line) and any_engine.STOPPED.search(line) is not None:
            self._stopped = self._number

    def _record(self, row: Fact | Complaint, match: re.Match[str], line: str) -> None:
        values = {name: value or "?" for name, value in match.groupdict().items()}
        if isinstance(row, Fact):
            what = row.what.format_map(values).strip("'\"")
            key = (row.kind, "none" if what in ("None", "null") else what)
            if key not in self._facts:
                self._facts[key] = (row.engines, self._number)
                self._votes.row(row.engines)
            if row.kind == "state":
                self._ready = self._number
            return
        seen = self._seen.get(row.name)
        if seen is None:
            said, consequence, remedy = (
                text.format_map(values) for text in (row.said, row.consequence, row.remedy)
            )
            shown = message(line).strip()[:_SHOWN]
            seen = self._seen[row.name] = _Seen(row, (said, consequence, remedy), shown, self._number)
            self._votes.row(row.engines)
        seen.count += 1
        if row.follow:
            self._following = (seen, re.compile(row.follow))

    def _follow(self, line: str) -> None:
        """A further line of the message before belongs to it, as long as it looks like one."""
        assert self._following is not None
        seen, pattern = self._following
        match = pattern.match(message(line))
        if match is None:
            self._following = None
        elif match["detail"][:_SHOWN] not in seen.details and len(seen.details) < _MOST_DETAILS:
            seen.details.append(match["detail"][:_SHOWN])

    def _end(self, text: str) -> None:
        """Remember the last exception, and the last that does not just pass on another."""
        if any_engine.EXCEPTION.match(text) is not None:
            self._last_error = self._number
            if any_engine.SECONDHAND.search(text) is None:
                self._root = (self._number, text[:_SHOWN])

    def report(self) -> Report:
        """What the lines say so far. InputError when none of them is an engine's."""
        engines = self._votes.decided(self._number, self._head)
        known = _settled({key: line for key, (of, line) in self._facts.items() if set(of) & set(engines)})
        seen = [
            one
            for one in self._seen.values()
            if set(one.row.engines) & set(engines) and one.count >= one.row.least
        ]
        findings = [one.finding() for one in seen]
        together = list(_together(engines, known, {one.name: one for one in findings}))
        spoken_for = {name for row, _ in together for name in row.complaints}
        findings = [one for one in findings if one.name not in spoken_for] + [one for _, one in together]
        findings += [*self._several(), *self._ended(findings)]
        findings.sort(key=lambda one: (SEVERITIES.index(one.severity), one.first))
        running = [Running(kind, what, line) for (kind, what), line in known.items() if kind != "version"]
        running.sort(key=lambda one: (KINDS.index(one.kind), one.line))
        version = next((what for kind, what in known if kind == "version"), "")
        unsaid = tuple(_unsaid(engines, known))
        return Report(" or ".join(engines), version, tuple(running), tuple(findings), unsaid, self._number)

    def _several(self) -> Iterator[Finding]:
        if self._votes.several:
            names = [NAMES[engine] for engine in self._votes.several]
            yield Finding(
                "several-engines",
                "warning",
                f"The log has lines of {joined(names).replace(' or ', ' and ')}.",
                "Only the lines of the one that printed most are reported.",
                "Pass one log at a time.",
                line="",
                count=1,
                first=1,
            )

    def _ended(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """An exception near the end, unless a finding is about that very line."""
        number, text = self._root if self._root[0] else (self._last_error, "see the lines before it")
        near = (
            self._last_error > self._ready
            and self._number - self._last_error <= _TAIL
            and not 0 < self._stopped < self._last_error
        )
        if not near or any(one.severity == "error" and one.line == text for one in findings):
            return
        served = self._ready > 0
        yield Finding(
            "failed-later" if served else "ends-in-error",
            "warning" if served else "error",
            f"The log ends in an error{' that came while the engine was serving' if served else ''}.",
            "A request failed, or the server died." if served else "The engine did not start.",
            "Look for the message in the engine's issues; `narrowcast doctor --symptom` for what it did "
            "before.",
            line=text,
            count=1,
            first=number,
        )


def _settled(facts: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Facts without those that leave open what another of their kind tells: auto beside fp8."""
    told = {kind for kind, what in facts if what not in ("auto", "none")}
    return {
        (kind, what): line
        for (kind, what), line in facts.items()
        if kind not in told or what not in ("auto", "none")
    }


def _together(
    engines: tuple[str, ...], known: dict[tuple[str, str], int], found: dict[str, Finding]
) -> Iterator[tuple[Conjunction, Finding]]:
    kinds = {kind for kind, _ in known}
    for row in CONJUNCTIONS:
        if set(row.engines) & set(engines) and not any(name in kinds or name in found for name in row.absent):
            evidence = list(_evidence(row, known, found))
            if all(evidence):
                line, first = max((one for one in evidence if one is not None), key=lambda one: one[1])
                texts = (row.said, row.consequence, row.remedy)
                yield row, Finding(row.name, row.severity, *texts, line=line, count=1, first=first)


def _evidence(
    row: Conjunction, known: dict[tuple[str, str], int], found: dict[str, Finding]
) -> Iterator[tuple[str, int] | None]:
    """For each condition the text and line that meet it, or None."""
    for kind, regex in row.facts:
        pattern = re.compile(regex)
        yield next(
            (
                (f"{kind}: {what}", line)
                for (of, what), line in known.items()
                if of == kind and pattern.search(what)
            ),
            None,
        )
    for name in row.complaints:
        yield (found[name].line, found[name].first) if name in found else None


def _unsaid(engines: tuple[str, ...], known: Iterable[tuple[str, str]]) -> Iterator[str]:
    said = {kind for kind, _ in known}
    real = {kind for kind, what in known if what.lower() not in _NOTHING}
    for row in EXPECTED:
        wanted = set(row.engines) & set(engines) and (not row.only_with or row.only_with in real)
        if wanted and row.kind not in said:
            yield row.kind
