"""The pages of ``narrowcast gpus``: all accelerators in one table, one with every number and who says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowcast.hardware.cost import ridge
from narrowcast.hardware.gpu import COLUMNS, GPU, Source
from narrowcast.hardware.gpus import GPUs, gpus
from narrowcast.report.tables import facts, hanging, paragraph, percent, table

TITLES = ("GPU", "arch", "GB", "TB/s", "16 bit", "fp8", "int8", "fp4", "fp8 as", "blocks")
SHOWN = ("fp8", "int8", "fp4")
BLOCKS = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")
LEGEND = (
    "Dense TFLOPS (integers: TOPS) as published, accumulated in FP32 where a card has the choice. -: the matrix units "
    "do not take it; ?: not known. fp8 as: how eight bits are read; fnuz is half of fn, ieee ends at 240. blocks: MX "
    "and NVFP4 scales are applied inside the unit. A unit that takes a format is one of three conditions: the engine "
    "needs a kernel for it, and the inputs must be quantized too."
)


def cells(row: GPU) -> tuple[str, ...]:
    """One line of the table of all."""
    blocks = [
        word for word in ("mx", "nv") if any(name.startswith(word) for name in row.formats & set(BLOCKS))
    ]
    return (
        row.name, row.arch or "?", _number(row.memory_gb), _number(row.bandwidth_tb_s),
        _sixteen(row), *(peak_cell(row, column) for column in SHOWN), row.fp8_kind or "-", "+".join(blocks) or "-",
    )  # fmt: skip


def _sixteen(row: GPU) -> str:
    """The peak in BF16, or in FP16 where a card has no BF16."""
    return peak_cell(row, "bf16" if row.multiplies("bf16") or not row.multiplies("fp16") else "fp16")


def peak_cell(row: GPU, column: str) -> str:
    """A peak, or why there is none."""
    tera = row.peaks.get(column)
    return _number(tera) if tera is not None else "?" if row.multiplies(column) else "-"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _bandwidth(row: GPU) -> str:
    """In TB/s, of a processor in GB/s."""
    tera = row.bandwidth_tb_s
    small = tera is not None and tera < 0.2
    return f"{_number(1000 * tera)} GB/s" if small and tera is not None else f"{_number(tera)} TB/s"


def gpus_page(rows: GPUs = gpus) -> list[str]:
    """Every accelerator in one table."""
    return [
        *table(TITLES, [cells(row) for row in rows.values()], "llrrrrrrll"),
        "",
        *paragraph(f"16 bit: BF16, or FP16 where there is no BF16. {LEGEND}"),
        *paragraph("`narrowcast gpus H100` shows one with ridge points, traps and who says each number."),
    ]


def gpu_page(row: GPU, count: int = 1) -> list[str]:
    """One accelerator; ``count`` of the same are there."""
    sources = list(dict.fromkeys(row.source_of(subject) for subject in told(row)))
    lines = [row.name if count == 1 else f"{count} x {row.name}", ""]
    lines += facts(
        [
            ("arch", _arch(row)),
            ("also called", ", ".join(row.aliases)),
            ("multiplies", ", ".join(sorted(row.formats))),
        ]
    )
    lines += ["", *table(("", "dense", "ridge", "reached", "share", "who"), _numbers(row, sources), "lrrrrl")]
    said = [f"[{number}] {source.words}, {source.date}" for number, source in enumerate(sources, 1)]
    for block in (said, [_note(text, about) for text, about in row.notes.items()]):
        lines += ["", *(part for line in block for part in hanging(line))] if block else []
    return lines


def _arch(row: GPU) -> str:
    said = row.arch or "not known"
    if row.capability is None:
        return said
    return f"{said}, compute capability {row.capability[0]}.{row.capability[1]}"


def _note(text: str, about: frozenset[str]) -> str:
    """A note with what it is about in front, in the order of the page."""
    said = subjects(about)
    return f"note: {said}: {text}" if said else f"note: {text}"


def subjects(about: frozenset[str]) -> str:
    """What a note is about, in the order of the page."""
    return ", ".join(subject for subject in ("memory", "bandwidth", *COLUMNS) if subject in about)


def told(row: GPU) -> list[str]:
    """The subjects that have a number."""
    known = [("memory", row.memory_gb), ("bandwidth", row.bandwidth_tb_s), *row.peaks.items()]
    return [subject for subject, value in known if value is not None] + (["achieved"] if row.achieved else [])


def _numbers(row: GPU, sources: Sequence[Source]) -> list[tuple[str, ...]]:
    """Memory, bandwidth and every peak; FLOP per byte where both are equal; what was reached; by whom it is said."""

    def who(*subjects: str) -> str:
        return "".join(f"[{sources.index(row.source_of(subject)) + 1}]" for subject in subjects)

    lines: list[tuple[str, ...]] = []
    seen = "" if row.usable in (None, row.memory) else f", {_number(round(row.usable / 2**30, 1))} GiB seen"
    memory = f"{_number(row.memory_gb)} GB{seen}"
    for subject, value, said in (
        ("memory", row.memory_gb, memory), ("bandwidth", row.bandwidth_tb_s, _bandwidth(row)),
    ):  # fmt: skip
        known = value is not None
        lines.append((subject, said if known else "not known", "", "", "", who(subject) if known else ""))
    for column in COLUMNS:
        tera, reached = row.peaks.get(column), row.achieved.get(column)
        if tera is None:
            lines.append((column, "not known" if row.multiplies(column) else "-", "", "", "", ""))
            continue
        unit = "TOPS" if column.startswith("int") else "TFLOPS"
        point = ridge(row, column)
        lines.append(
            (
                column, f"{_number(tera)} {unit}", "" if point is None else f"{point:.0f} FLOP/B",
                "" if reached is None else _number(reached), "" if reached is None else percent(reached / tera),
                who(column, *(("achieved",) if reached is not None else ())),
            )
        )  # fmt: skip
    return lines


def gpu_record(row: GPU) -> dict[str, Any]:
    """One accelerator for machines: bytes, bytes and operations a second; null is unknown or not there."""
    return {
        "name": row.name,
        "aliases": row.aliases,
        "vendor": row.vendor,
        "arch": row.arch,
        "capability": row.capability,
        "memory": row.memory,
        "usable": row.usable,
        "bandwidth": row.bandwidth,
        "formats": row.formats,
        "fp8_kind": row.fp8_kind,
        "peaks": {column: row.peak(column) for column in COLUMNS},
        "ridges": {column: ridge(row, column) for column in COLUMNS},
        "achieved": {column: row.achievable(column) for column in COLUMNS},
        "notes": [{"text": text, "about": about} for text, about in row.notes.items()],
        "sources": {subject: row.source_of(subject)._asdict() for subject in told(row)},
    }
