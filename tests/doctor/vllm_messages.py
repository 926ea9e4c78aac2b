"""Messages as vLLM's own source has them, as regexes with holes for what is filled in, to match lines against."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ENGINE = Path(__file__).parents[2] / ".venv-engine"
LEAST = 5  # letters that a message must have outside of its holes
_HOLE = re.compile(r"%(?:\.\d+)?[sdrf]|\{\}|\$\{\w\}")


@cache
def source() -> Path | None:
    """The folder of vLLM's modules in the engine's environment, or None."""
    return next(ENGINE.glob("lib/python3*/site-packages/vllm"), None)


@cache
def messages(path: Path) -> tuple[re.Pattern[str], ...]:
    """Every line of every string of a module."""
    texts = {line for node in ast.walk(ast.parse(path.read_text())) for line in _text(node).splitlines()}
    return tuple(
        re.compile(".*?".join(map(re.escape, _HOLE.split(text))))
        for text in sorted(texts)
        if _letters(text) >= LEAST
    )


def says(path: Path, line: str, span: tuple[int, int]) -> bool:
    """Whether a message of the module stands in ``line`` where a row matched it."""
    return any(
        match.start() < span[1] and span[0] < match.end()
        for pattern in messages(path)
        for match in pattern.finditer(line)
    )


def _letters(text: str) -> int:
    return len(_HOLE.sub("", text).strip())


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_parts(node))
    return ""


def _parts(node: ast.JoinedStr) -> Iterator[str]:
    for part in node.values:
        yield _text(part) if isinstance(part, ast.Constant) else "{}"
