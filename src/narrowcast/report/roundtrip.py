"""The page of ``narrowcast roundtrip``: what formats, schemes and rules lose on the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowcast.jobs.roundtrip import Trip
from narrowcast.report.tables import decibel, facts, number, quantity, table


def roundtrip_page(source: str, shape: tuple[int, ...], dtype: str, trips: Sequence[Trip]) -> list[str]:
    """One line for each way; counts are of elements."""
    varied = [name for name in {t.name for t in trips} if len({t.span for t in trips if t.name == name}) > 1]
    rows = []
    for t in trips:
        name = f"{t.name} /{number(t.span)}" if t.name in varied else t.name
        rows.append(
            (
                name,
                t.rule,
                f"{t.bits:.3f}".removesuffix(".000"),
                decibel(t.errors.sqnr, 2),
                _share(t.max_relative_error),
                _share(t.mean_relative_error),
                quantity(t.errors.clipped),
                quantity(t.errors.underflowed),
                quantity(t.saturated),
            )
        )
    titles = ("", "rule", "bits", "SQNR", "max", "mean", "clipped", "to 0", "at max")
    return [
        f"{source}: {'x'.join(map(str, shape))} {dtype}",
        "",
        *table(titles, rows, "lLrrrrrrr"),
        "",
        *facts(
            [
                ("SQNR", "signal to quantization noise, in dB"),
                ("max, mean", "relative error of the elements that are not zero"),
                (
                    "clipped",
                    "elements beyond the range; to 0: nonzero elements that became zero; at max: elements on "
                    "the largest code",
                ),
            ],
            indent=0,
        ),
    ]


def _share(value: float) -> str:
    return f"{100 * value:.3g}%" if value < 10 else f"{value:.1e}x"


def roundtrip_record(
    source: str, shape: tuple[int, ...], dtype: str, seed: int, trips: Sequence[Trip]
) -> dict[str, Any]:
    return {
        "source": source,
        "shape": shape,
        "dtype": dtype,
        "seed": seed,
        "results": [
            {
                "name": t.name,
                "rule": None if t.rule == "-" else t.rule,
                "span": t.span,
                "bits": t.bits,
                "sqnr_db": t.errors.sqnr,
                "relative_mse": t.relative_mse,
                "max_relative_error": t.max_relative_error,
                "mean_relative_error": t.mean_relative_error,
                "elements": t.errors.elements,
                "clipped": t.errors.clipped,
                "underflowed": t.errors.underflowed,
                "saturated": t.saturated,
            }
            for t in trips
        ],
    }
