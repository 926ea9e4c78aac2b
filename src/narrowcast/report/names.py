"""Many names in few words: names that differ in their numbers only are folded into one with the numbers' ranges.

    model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj  ->  model.layers.{0-1}.mlp.up_proj

A folded name stands for every combination of its ranges, so names are folded from the last number to the first, and
only where all other numbers agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(
    r"(?<=\.)(0|[1-9]\d*)(?=\.|$)"
)  # a layer or an expert, not the 8 of fp8 nor a shard's 00003


def folded(names: Iterable[str]) -> list[tuple[str, int]]:
    """Folded names in order of their first, each with how many it stands for."""
    shapes: dict[tuple[str, ...], dict[tuple[int, ...], None]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        shapes.setdefault(tuple(parts[::2]), {})[tuple(map(int, parts[1::2]))] = None
    found = []
    for texts, numbers in shapes.items():
        for ranges in _boxes(list(numbers)):
            size = 1
            for one in ranges:
                size *= len(one)
            found.append((_spelled(texts, ranges), size))
    return found


def _boxes(numbers: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    boxes = [tuple((n,) for n in row) for row in numbers]
    for axis in reversed(range(len(numbers[0]))):
        merged: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for box in boxes:
            merged.setdefault((*box[:axis], *box[axis + 1 :]), []).extend(box[axis])
        boxes = [(*rest[:axis], tuple(sorted(set(found))), *rest[axis:]) for rest, found in merged.items()]
    return boxes


def _spelled(texts: tuple[str, ...], ranges: tuple[tuple[int, ...], ...]) -> str:
    words = [texts[0]]
    for numbers, text in zip(ranges, texts[1:], strict=True):
        words += [str(numbers[0]) if len(numbers) == 1 else f"{{{_ranges(numbers)}}}", text]
    return "".join(words)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3,7``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
