"""The page of ``narrowcast compare``: where two checkpoints agree, where they do not, and what is known of why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import inf

from narrowcast.jobs.compare import Compared, Comparison, Grade
from narrowcast.report.tables import decibel, facts, hanging, number, quantity, table

WORST = 10
_GRADES: dict[Grade, str] = {
    "identical": "bit for bit as stored",
    "respelled": "in codes and scales, spelled differently",
    "equal": "in every value",
}


def compare_page(found: Comparison) -> list[str]:
    """By role, the worst tensors, where they differ first, diagnoses, what one side lacks, the verdict."""
    sides = [(x, f"{path} ({c})") for x, path, c in zip("AB", found.paths, found.containers, strict=True)]
    worst = found.worst[:WORST]
    blocks = [facts(sides, indent=0), _roles(found), _worst(worst), _firsts(worst), _diagnoses(found)]
    lines = [line for block in blocks if block for line in (*block, "")]
    return [*lines, *facts(_counts(found)), *_notes(found), *hanging(_verdict(found))]


def _roles(found: Comparison) -> list[str]:
    rows = []
    for (role, a, b), tensors in found.roles().items():
        equal = sum(tensor.same for tensor in tensors)
        worst = min(tensor.sqnr for tensor in tensors)
        rows.append((role, a, b, str(len(tensors)), str(equal), _level(worst)))
    return table(("role", "A", "B", "tensors", "equal", "worst dB"), rows, "LLLrrr", indent=2) if rows else []


def _level(sqnr: float) -> str:
    return "equal" if sqnr == inf else decibel(sqnr)


def _worst(worst: Sequence[Compared]) -> list[str]:
    rows, (path, names) = [], _shortened(worst)
    for tensor, name in zip(worst, names, strict=True):
        if tensor.grade == "shape":
            rows.append((name, *map(_shape, tensor.shapes), "shape", "-", "-", "-"))
            continue
        tally = tensor.tally
        losses = (decibel(tensor.sqnr), number(tally.max_error, 3), number(tally.max_relative, 3))
        rows.append((name, tensor.a, tensor.b, *losses, quantity(tally.differing)))
    titles = (f"worst {len(rows)}{path}", "A", "B", "dB", "max error", "relative", "differ")
    return table(titles, rows, "LLLrrrr", indent=2) if rows else []


def _shortened(tensors: Sequence[Compared]) -> tuple[str, list[str]]:
    """Names without the path that they all begin with, and that path for the title."""
    names = [tensor.name for tensor in tensors]
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts)]
    path = ".".join(shared) if len(names) > 1 else ""
    return (f" in {path}", [name[len(path) + 1 :] for name in names]) if path else ("", names)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _firsts(worst: Sequence[Compared]) -> list[str]:
    """Two lines for each tensor: the value and the code of A, and those of B below."""
    rows, (path, names) = [], _shortened(worst)
    for tensor, name in zip(worst, names, strict=True):
        at = tensor.first
        if at is not None:
            rows.append((name, f"{at.row},{at.column}", "A", number(at.a), at.a_code))
            rows.append(("", "", "B", number(at.b), at.b_code))
    return (
        table((f"first difference{path}", "row,column", "", "value", "code"), rows, "Lrlrr", indent=2)
        if rows
        else []
    )


def _diagnoses(found: Comparison) -> list[str]:
    """Each mistake once, with the tensors that have it."""
    by_words: dict[tuple[str, str], list[Compared]] = {}
    for tensor in found.worst:
        diagnosis = tensor.diagnosis
        if diagnosis is not None:
            by_words.setdefault((diagnosis.said, diagnosis.remedy), []).append(tensor)
    lines = []
    for (said, remedy), tensors in by_words.items():
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        diagnosis = tensors[0].diagnosis
        assert diagnosis is not None
        measured = f"{_level(diagnosis.before)} dB" if diagnosis.before > -inf else "nothing in common"
        undone = "equal" if diagnosis.after == inf else f"{decibel(diagnosis.after)} dB"
        lines += hanging(f"{tensors[0].name}{more}: {said} ({measured} as it is, {undone} without that).")
        lines += hanging(f"  remedy: {remedy}")
    return lines


def _counts(found: Comparison) -> list[tuple[str, str]]:
    grades = found.grades()
    equal = [f"{grades[grade]} {words}" for grade, words in _GRADES.items() if grades[grade]]
    return [
        ("equal", ", ".join(equal)),
        ("only in A", _such(found.only_a)),
        ("only in B", _such(found.only_b)),
    ]


def _such(missing: Sequence[tuple[str, str]]) -> str:
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{missing[0][0]} ({missing[0][1]}){more}"


def _notes(found: Comparison) -> list[str]:
    return [part for note in found.notes for part in hanging(f"note: {note}")]


def _verdict(found: Comparison) -> str:
    total, differing = len(found.tensors), len(found.worst)
    missing = len(found.only_a) + len(found.only_b)
    lost = f"; {missing} tensors are on one side only" if missing else ""
    if found.passed and not differing:
        return f"Equal: all {total} tensors."
    if found.min_sqnr == inf:
        return f"Different: {differing} of {total} tensors{lost}."
    below = sum(tensor.sqnr < found.min_sqnr for tensor in found.tensors)
    asked = f"{number(found.min_sqnr)} dB"
    if found.passed:
        return f"Within {asked}: {differing} of {total} tensors differ, none by more."
    return f"Worse than {asked}: {below} of {total} tensors{lost}."
