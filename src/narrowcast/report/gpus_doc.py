"""What docs/gpus.md says around its tables, and the rows of those: every column, every note, every source."""

from __future__ import annotations

import inspect
from textwrap import dedent

from narrowcast.hardware import own_gpus
from narrowcast.hardware.gpu import COLUMNS, Source
from narrowcast.hardware.gpus import gpus
from narrowcast.report.gpus import LEGEND, cells, peak_cell, subjects, told

INTRO = (
    "What `narrowcast gpus`, `plan`, `serve` and `audit` know of accelerators. A name may be the driver's: any case "
    "and punctuation, with the maker in front. A number that is published as a range is its lower end, of two that "
    "disagree the lower is taken, and a note says so. No number of a table is derived from another.",
    "",
    "Cards are sold by GB that are GiB, and programs see a little less of them: what is seen is what a plan counts "
    "with (`usable` in `--json`, in bytes). A bound on products takes rates above the printed ones where engines reach "
    "them: FP8 of a GeForce accumulated as CUTLASS does, an H100 NVL at its clock.",
    "",
    f"{LEGEND} reached: what the largest products reached, in TFLOPS.",
)
OWN = (
    "Tables in a TOML file, named by `--gpus FILE` or by the variable `NARROWCAST_GPUS`; no file is read without being "
    "named. A row may be like another: what it does not say is the other's."
)
HERE = """\
`narrowcast gpus --here`, and `--gpu here` of other verbs: what nvidia-smi, amd-smi or rocm-smi lists, with the memory
that the driver reports. A card without a row keeps what the driver says, and its bandwidth and peaks are unknown.
Without a GPU it is the processor: for about a second its bandwidth is measured, reading and copying arrays of several
last caches with all threads. The fastest pass counts, and the median is told beside it: other work on the machine
lowers both. From Python: `narrowcast.hardware.own_gpus.named(NAME, FILE)`."""


def doc_own() -> list[str]:
    """The file of own rows: its example and its keys, as the module that reads it has them."""
    text = str(inspect.getdoc(own_gpus))
    start, end = text.index("    [gpu."), text.index("Further keys")
    keys = text[end : text.index(" Left out")].replace("``", "`")
    return [OWN, "", "```toml", *dedent(text[start:end]).strip().splitlines(), "```", "", *keys.splitlines()]


def doc_rows(sources: list[Source]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The table of all with every column, and by number who says a row; ``sources`` grows by what is new."""
    titles = ["GPU", "arch", "GB", "TB/s", *COLUMNS, "fp8 as", "blocks", "reached", "sources"]
    rows = []
    for row in gpus.values():
        for subject in told(row):
            if row.source_of(subject) not in sources:
                sources.append(row.source_of(subject))
        said = dict.fromkeys(row.source_of(subject) for subject in told(row))
        name, arch, memory, bandwidth, *_, kind, blocks = cells(row)
        reached = ", ".join(f"{column} {tera:.4g}" for column, tera in row.achieved.items())
        numbers = " ".join(str(sources.index(source) + 1) for source in said)
        peaks = (peak_cell(row, column) for column in COLUMNS)
        rows.append((f"`{name}`", arch, memory, bandwidth, *peaks, kind, blocks, reached, numbers))
    return titles, rows


def doc_notes() -> list[tuple[str, str, str]]:
    """Each note once: which GPUs, what it is about, the words."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in gpus.values():
        for text, about in row.notes.items():
            names.setdefault((subjects(about), text), []).append(f"`{row.name}`")
    return [(", ".join(found), about, text) for (about, text), found in names.items()]
