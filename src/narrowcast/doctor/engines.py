"""Which engine wrote a log: lines that only one of them prints, then the form of its lines, then whose rows fired.

A log of wrappers (NIM, Triton, Ray) has forms of several. An engine's own banner outweighs any number of forms; a
row that fired counts one; the form of SGLang's lines, which other programs use too, only decides between equals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from narrowcast.doctor.rows import EVERY, NAMES
from narrowcast.errors import InputError

_FORMS = (
    (1000.0, "vllm", r"vLLM (?:API )?server version \d|Initializing an? (?:V\d )?LLM engine|\(EngineCore"),
    (1000.0, "sglang", r"\bServerArgs\(model_path=|sglang\.launch_server|Load weight (?:begin|end)\."),
    (1000.0, "tensorrt-llm", r"TensorRT[- ]LLM version:|\[TRT-LLM[^\]]*\] ?\[|\[TensorRT-LLM\]\["),
    (1.0, "vllm", r"(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[\w./]+:\d+\]"),
    (0.001, "sglang", r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]"),
)
_SURE = 1000.0
_ENOUGH = 200  # lines with a form; more cannot change the outcome


class Votes:
    """Counts for each engine, line by line; ``decided`` ends the vote."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(EVERY, 0.0)
        self._forms = [(weight, engine, re.compile(regex)) for weight, engine, regex in _FORMS]
        self._left = _ENOUGH

    def line(self, line: str) -> None:
        if not self._left:
            return
        found = [(weight, engine) for weight, engine, form in self._forms if form.search(line) is not None]
        self._left -= bool(found)
        for weight, engine in found:
            self._counts[engine] += weight

    def row(self, engines: tuple[str, ...]) -> None:
        """A row of these engines fired; one of every engine says nothing."""
        if engines != EVERY:
            for engine in engines:
                self._counts[engine] += 1

    def decided(self, lines: int, head: str) -> tuple[str, ...]:
        """The engine, or those between which nothing decides; InputError when it is none of them."""
        most = max(self._counts.values())
        if most < 1:
            raise InputError(
                "this is no start-up log of " + joined(NAMES.values()),
                got=f"{lines} lines, of which none is theirs: {head[:80]!r}"
                if head
                else "nothing but empty lines",
                remedy="pass everything that the engine prints: `vllm serve MODEL 2>&1 | tee start.log`",
            )
        return tuple(engine for engine, count in self._counts.items() if count == most)

    @property
    def several(self) -> tuple[str, ...]:
        """Engines that are there for sure, where there is more than one."""
        sure = tuple(engine for engine, count in self._counts.items() if count >= _SURE)
        return sure if len(sure) > 1 else ()


def joined(names: Iterable[str]) -> str:
    """``vLLM, SGLang or TensorRT-LLM``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
