"""Files of answers, as evaluations leave them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def flips(lost: int, gained: int, n: int, right: int = 0) -> tuple[list[int], list[int]]:
    """Right and wrong of both models: ``lost`` and ``gained`` flip, ``right`` are right in both, the rest wrong."""
    rest = n - lost - gained - right
    a = [1] * lost + [0] * gained + [1] * right + [0] * rest
    b = [0] * lost + [1] * gained + [1] * right + [0] * rest
    return a, b


def plain(scores: Sequence[float], **fields: Sequence[Any]) -> list[dict[str, Any]]:
    """JSON lines of id, score, and further fields by name."""
    return [
        {"id": f"q{i}", "score": score} | {name: values[i] for name, values in fields.items()}
        for i, score in enumerate(scores)
    ]


def pair(
    folder: Path, lost: int, gained: int, n: int, right: int = 0, **fields: Sequence[Any]
) -> tuple[Path, Path]:
    """Both models' files of plain lines."""
    a, b = flips(lost, gained, n, right)
    return write(folder / "a.jsonl", plain(a, **fields)), write(folder / "b.jsonl", plain(b, **fields))
