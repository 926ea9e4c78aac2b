"""Lines of a log as the engine meant them: without colours, times, processes and the wrapping of log collectors.

A start-up log reaches people through Docker, Kubernetes, journald, JSON collectors and terminals, each of which
puts something in front of a line. ``message`` takes off whatever it knows, as often as it finds it. Rows search
inside of lines, so that a prefix nobody thought of does no harm; it is only shown.

Left out: lines that a terminal wrapped, which nothing can put together again without guessing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from narrowcast.errors import InputError

LONGEST = 1 << 14  # characters of one line that are looked at; configuration lines have some thousands
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)"
_PREFIXES = tuple(
    re.compile(regex)
    for regex in (
        r"\s*[\w.-]+\s+\| ?",  # docker compose
        rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\s+(?:(?:stdout|stderr) [FP] )?",  # Kubernetes, logging
        rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} \S+ [\w./-]+\[\d+\]: ",  # journald
        r"\[\w+,\d+\]<std\w+>:\s?",  # mpirun
        r"\(\w[\w.-]*(?: pid=\d+)?(?:, ip=[^)]*)?\) ?",  # vLLM's and Ray's processes
        rf"{_LEVEL}:? +\d\d-\d\d {_CLOCK} \[?[^\s\]]+:\d+\] ?",  # vLLM
        r"\[gpu_id=\d+\] ",  # old SGLang
        rf"\[\d{{4}}-\d\d-\d\d {_CLOCK}[^\]]*\] ?",  # SGLang
        rf"\[?{_LEVEL}\]?:? ?(?:[\w./-]+(?:\.py)?:\d+: |:?[\w.]+:)?",  # SGLang in full, logging's default
        rf"\[\d\d/\d\d/\d{{4}}-{_CLOCK}\] ?",  # TensorRT-LLM, Python
        r"\[TRT-LLM[^\]]*\] ?(?:\[[A-Z]\] ?)?(?:\[[\w ]{1,12}\] ?)?(?:\[RANK \d+\] ?)?",
        r"\[TensorRT-LLM\] ?(?:\[[A-Z]+\] ?)?",  # TensorRT-LLM, C++
    )
)
_JSON_KEYS = ("message", "msg", "log")


def read(path: Path | None, standard_input: Iterator[bytes] | None = None) -> Iterator[str]:
    """Lines of a log file, or of ``standard_input``, decoded as UTF-8 with other bytes replaced.

    Raises InputError when the file cannot be read.
    """
    if path is None:
        assert standard_input is not None
        yield from map(decoded, standard_input)
        return
    try:
        with path.open("rb") as file:
            yield from map(decoded, file)
    except OSError as error:
        raise InputError(
            "the log cannot be read",
            where=path,
            got=error.strerror or str(error),
            remedy="name a text file, or -",
        ) from None


def decoded(line: bytes) -> str:
    # PowerShell redirects UTF-16; what is left of it between NULs is ASCII.
    text = line.replace(b"\0", b"") if b"\0" in line else line
    return text.decode("utf-8", "replace")


def cleaned(line: str) -> str:
    """One line without colours and line ends, out of its JSON if it is in some; overwritten text stays."""
    text = line[:LONGEST].rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.replace("\r", " ")
    return _unwrapped(text) if text.startswith("{") and '"' in text else text


def _unwrapped(text: str) -> str:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    found = next((content[key] for key in _JSON_KEYS if isinstance(content.get(key), str)), text)
    return cleaned(found) if found is not text and not found.startswith("{") else found


def message(line: str) -> str:
    """What is left of a cleaned line without what was put in front of it."""
    start, limit = 0, 12
    while limit:
        matched = next(
            (m for prefix in _PREFIXES if (m := prefix.match(line, start)) and m.end() > start), None
        )
        if matched is None:
            break
        start, limit = matched.end(), limit - 1
    return line[start:]
