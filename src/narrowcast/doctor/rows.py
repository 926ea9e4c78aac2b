"""What the tables of the doctor are made of: what a line tells, what is wrong with it, what its absence means.

A row is tried on a line only when one of its ``words`` is a word of the line (letters, digits and underscores),
so that a log of millions of lines costs one split and some look-ups per line, however many rows there are.
``regex`` then searches the line; its named groups fill the braces of the texts. A regex that begins with a group of
any length is held to the beginning of a word, else lines without spaces take quadratic time.

``source`` says where the engine prints the line. "vLLM 0.32 PATH" was looked up below ``vllm/`` of that version, and
a test matches the row against the messages in that file; other versions and engines are as their sources had them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
VLLM, SGLANG, TRTLLM = ("vllm",), ("sglang",), ("tensorrt-llm",)
EVERY = (*VLLM, *SGLANG, *TRTLLM)


@dataclass(frozen=True, slots=True)
class Fact:
    """A line that tells what runs: ``what`` of ``kind``, such as the kernel of FP8 layers."""

    kind: str
    what: str
    engines: tuple[str, ...]
    words: tuple[str, ...]
    regex: str
    source: str


@dataclass(frozen=True, slots=True)
class Complaint:
    """A line that says that something is not as people think it is.

    ``follow`` matches further lines of the same message, such as one reason per kernel, and names the part that is
    kept ``detail``. With less than ``least`` such lines it is none.
    """

    name: str
    severity: Severity
    engines: tuple[str, ...]
    words: tuple[str, ...]
    regex: str
    said: str
    consequence: str
    remedy: str
    source: str
    follow: str = ""
    least: int = 1


@dataclass(frozen=True, slots=True)
class Conjunction:
    """What several lines say together, or one says and another ought to have said; it speaks for its ``complaints``.

    ``facts`` pairs a kind with a regex on what was told of it; all must be there, as must all ``complaints``;
    of ``absent``, which names kinds and complaints, nothing may be.
    """

    name: str
    severity: Severity
    engines: tuple[str, ...]
    said: str
    consequence: str
    remedy: str
    facts: tuple[tuple[str, str], ...] = ()
    complaints: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """A kind of fact that a whole log of these engines tells; ``only_with`` a fact of another kind."""

    kind: str
    engines: tuple[str, ...]
    only_with: str = ""
