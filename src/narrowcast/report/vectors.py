"""The page of ``narrowcast vectors``: what was written, array by array, and how y comes about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowcast.jobs.vectors import Vectors, Written
from narrowcast.report.schemes import scales_words
from narrowcast.report.tables import facts, percent, size, table


def vectors_page(made: Vectors, files: Sequence[Written]) -> list[str]:
    """The computation, one line for each array, the formulas, the files."""
    m, n, k = made.shape
    linear = made.linear
    inputs = f"{linear.input.name} ({scales_words(linear.input)})" if linear.input else "wide, exact in bf16"
    rows = [
        (name, array.data.dtype.name, "x".join(map(str, array.data.shape)), size(array.data.nbytes))
        for name, array in made.arrays.items()
    ]
    formulas = [(name, made.arrays[name].meaning) for name in made.arrays if _is_formula(name)]
    return [
        f"{made.title}: x {m}x{k} times w {n}x{k} transposed, seed {made.seed}",
        "",
        *facts(
            [
                ("weights", f"{linear.weight.name} ({scales_words(linear.weight)})"),
                ("inputs", inputs),
                ("accumulated in", linear.accumulate),
                ("y is off by", f"{percent(made.worst)} of y_bound at most"),
            ]
        ),
        "",
        *table(("array", "type", "shape", "bytes"), rows, "Lllr", indent=2),
        "",
        *facts(formulas),
        "",
        *(f"wrote {written.path} ({size(written.size)})" for written in files),
    ]


def _is_formula(name: str) -> bool:
    """Arrays whose meaning is a formula rather than a name."""
    return name.startswith("y") or name.endswith("_decoded") or "_scales_" in name


def vectors_record(made: Vectors, files: Sequence[Written]) -> dict[str, Any]:
    return made.to_json() | {"files": [written.to_json() for written in files]}
