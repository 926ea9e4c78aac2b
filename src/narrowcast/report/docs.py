"""Reference pages made from the rows, so that they cannot say anything else than the program does.

    python -m narrowcast.report.docs            write docs/*.md that are generated, and the README's table
    python -m narrowcast.report.docs --check    exit 1 when they differ from what would be written

Long tables are Markdown; where a page of the command line says it best, that page is quoted at 80 columns.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from narrowcast.arguments import VERBS, parsers
from narrowcast.audit.rules import FAMILIES
from narrowcast.hardware import names
from narrowcast.hardware.gpu import Source
from narrowcast.hardware.gpus import gpus
from narrowcast.numbers.formats import Format, formats
from narrowcast.report import engines as engine_pages
from narrowcast.report.containers import LEGEND, container_rows, preset_rows
from narrowcast.report.formats import bit_layout, format_page
from narrowcast.report.gpus import gpu_page
from narrowcast.report.gpus_doc import HERE, INTRO, doc_notes, doc_own, doc_rows
from narrowcast.report.rules import Row
from narrowcast.report.rules import rows as rules
from narrowcast.report.schemes import scales_words, scheme_page
from narrowcast.report.tables import number
from narrowcast.tensors.presets import EXCLUDED_ROLES, KV_SUFFIXES, presets
from narrowcast.tensors.schemes import Scheme, group_shape, schemes

SHAPE = (4096, 4096)
FOLDER = Path(__file__).parents[3] / "docs"
README, RESULTS = FOLDER.parent / "README.md", FOLDER.parent / "engines" / "results.json"
BEGIN, END = "<!-- who loads what: begin -->", "<!-- who loads what: end -->"
NOTE = "<!-- Made by `python -m narrowcast.report.docs` from the rows in the code; edit those. -->"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; bars inside cells are escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def formats_doc() -> list[str]:
    titles = (
        "format",
        "bits",
        "layout",
        "bias",
        "max",
        "smallest normal",
        "smallest subnormal",
        "epsilon",
        "finite values",
        "binades",
        "special values",
        "aliases",
        "source",
    )
    return [
        "# Formats",
        "",
        NOTE,
        "",
        "Each format is one row of `narrowcast/numbers/formats.py`; every other number here is derived from "
        "it. Layout is sign-exponent-mantissa bits. Special values: `ieee` has infinities and NaNs in the "
        "top exponent, `fn` one NaN per sign, `fnuz` one NaN in the place of minus zero, `extended` that and "
        "infinities, `finite` none.",
        "",
        "`e3m3:bias=3,finite` spells a format that is not in the table: options are `bias=N`, one of `ieee`, "
        "`fn`, `fnuz`, `extended`, `finite`, and `nosubnormals`; a `u` in front makes it unsigned.",
        "",
        *markdown(titles, [_format_row(fmt) for fmt in formats.values()]),
        "",
        *_quoted("narrowcast formats e4m3fn", format_page(formats["e4m3fn"])),
        "",
        *_quoted("narrowcast formats e2m1", format_page(formats["e2m1"])),
    ]


def _format_row(fmt: Format) -> tuple[str, ...]:
    return (
        f"`{fmt.name}`",
        str(fmt.bits),
        bit_layout(fmt),
        str(fmt.bias),
        f"{fmt.max:.10g}",
        number(fmt.smallest_normal),
        number(fmt.smallest_subnormal),
        number(fmt.epsilon),
        f"{fmt.finite_values:,}",
        f"{fmt.binades:.4g}",
        fmt.specials.value,
        ", ".join(fmt.aliases),
        fmt.source,
    )


def schemes_doc() -> list[str]:
    titles = (
        "scheme",
        "element",
        "scales, inner to outer",
        "GroupShape",
        "rule",
        "zero point",
        "bits per weight",
        "loaded by",
        "source",
    )
    return [
        "# Schemes",
        "",
        NOTE,
        "",
        "A scheme is an element format and the scale levels above it. `1x128` is one scale per 128 columns "
        "of a row, `1xK` one per row (an output channel of a weight, a token of an activation). GroupShape "
        "is vLLM's spelling of the innermost tile. Bits per weight include scales and zero points, for "
        f"{SHAPE[0]}x{SHAPE[1]}.",
        "",
        *markdown(titles, [_scheme_row(scheme) for scheme in schemes.values()]),
        "",
        *_quoted("narrowcast schemes nvfp4 --shape 4096x14336", scheme_page(schemes["nvfp4"], (4096, 14336))),
    ]


def _scheme_row(scheme: Scheme) -> tuple[str, ...]:
    rules = ", ".join(scale.rule for scale in scheme.scales)
    shape = str(group_shape(scheme.inner.tile, weight=True))
    return (
        f"`{scheme.name}`",
        scheme.element.name,
        scales_words(scheme),
        shape,
        rules,
        scheme.zero.name if scheme.zero else "-",
        f"{scheme.bits_per_weight(SHAPE):.4g}",
        scheme.loads,
        scheme.source,
    )


def presets_doc() -> list[str]:
    titles = (
        "preset",
        "weights",
        "inputs",
        "accumulator",
        "calibration",
        "nearest without",
        "aliases",
        "loaded by",
    )
    rows = []
    for preset in presets.values():
        linear = preset.linear
        rows.append(
            (
                f"`{preset.name}`",
                linear.weight.name,
                linear.input.name if linear.input else "wide",
                linear.accumulate,
                "needed" if preset.calibrated else "not needed",
                preset.nearest or "-",
                ", ".join(preset.aliases),
                linear.weight.loads,
            )
        )
    suffixes = ", ".join(f"`+{suffix}`" for suffix in KV_SUFFIXES)
    return [
        "# Presets",
        "",
        NOTE,
        "",
        "A preset is what people type: how weights are kept and how inputs are quantized on the way into a "
        f"linear layer. Names are case-insensitive. {suffixes} behind a name quantize the KV cache too, "
        "which needs calibration statistics. `narrowcast calibrate` makes them, `quantize --stats` takes them; a "
        "preset that needs them refuses where there are none.",
        "",
        f"Kept as they are, unless a recipe says otherwise: {', '.join(sorted(EXCLUDED_ROLES))}.",
        "",
        *markdown(titles, rows),
    ]


def cli_doc() -> list[str]:
    made = parsers(dict.fromkeys(VERBS, lambda _: 0))
    lines = ["# Command line", "", NOTE, "", *_quoted("narrowcast --help", _help(made["narrowcast"]))]
    for verb in VERBS:
        lines += ["", f"## {verb}", "", *_quoted(f"narrowcast {verb} --help", _help(made[verb]))]
    return lines


def _help(parser: ArgumentParser) -> list[str]:
    return parser.format_help().splitlines()


def _quoted(command: str, page: Iterable[str]) -> list[str]:
    return ["```text", f"$ {command}", *page, "```"]


def containers_doc() -> list[str]:
    return [
        "# Containers",
        "",
        NOTE,
        "",
        "How engines spell quantized checkpoints. `narrowcast convert MODEL OUT --to NAME` moves a checkpoint from any "
        "of them into any that is written, `narrowcast quantize MODEL OUT --container NAME` quantizes into one "
        "that holds presets. `--to gguf` ([gguf.md](gguf.md)) and `--to onnx` ([onnx.md](onnx.md)) make one file "
        "and not a directory.",
        "",
        *markdown(*container_rows()),
        "",
        "## Who loads what",
        "",
        LEGEND.replace("docs/engines.md)", "engines.md)"),
        "",
        *markdown(*preset_rows(RESULTS)),
    ]


def gpus_doc() -> list[str]:
    sources: list[Source] = []
    table = markdown(*doc_rows(sources))
    said = [f"{number}. {source.words}, {source.date}" for number, source in enumerate(sources, 1)]
    return [
        "# GPUs",
        "",
        NOTE,
        "",
        *INTRO,
        "",
        *table,
        "",
        "Sources, with the day on which they were read; whitepapers and datasheets as public pages quote them:",
        "",
        *said,
        "",
        "## Notes",
        "",
        *markdown(("GPUs", "about", "note"), doc_notes()),
        "",
        "## One of them",
        "",
        *_quoted("narrowcast gpus H100", gpu_page(gpus["h100"])),
        "",
        "## Your own",
        "",
        *doc_own(),
        "",
        "## This machine's",
        "",
        HERE,
    ]


def engines_doc() -> list[str]:
    lines = [
        "# What engines call things",
        "",
        NOTE,
        "",
        "Every name that vLLM's and SGLang's flags take for quantization, KV caches, dtypes and kernels, and "
        "TensorRT-LLM's algorithms. Names are those of the wheels' own lists, which tests read. *Weights* and *inputs* "
        "are [schemes](schemes.md) that quantizing while loading makes, *from* is the compute capability that the "
        "engine asks for. What the engines make of files is in [engines.md](engines.md).",
        "",
        "## Both factorings",
        "",
        *markdown(("", "vLLM", "SGLang", "note"), engine_pages.factoring_cells()),
    ]
    for engine, versions in names.VERSIONS.items():
        lines += ["", f"## {engine_pages.ENGINES[engine]} {', '.join(versions)}", ""]
        lines += markdown(*engine_pages.methods_table(engine))
        lines += ["", "KV caches:", "", *markdown(*engine_pages.caches_table(engine))]
        changed = engine_pages.changes(engine)
        if changed:
            lines += [
                "",
                f"Which kernel runs is answered for {versions[0]}. What newer versions changed:",
                "",
            ]
            lines += markdown(("list", "change"), changed)
    return lines


def rules_doc() -> list[str]:
    lines = [
        "# Rules",
        "",
        NOTE,
        "",
        "What `narrowcast audit` looks for ([guide](../audit.md)). Rules are selected and silenced by code, by the "
        "beginning of a code or by name. *Reads* is how deep a rule looks: headers, scales, codes, or the parent as "
        "well; `--quick` reads scales at most.",
    ]
    for digit, family in FAMILIES.items():
        members = [row for row in rules().values() if row.code[2] == digit]
        if members:
            lines += ["", f"## {family.capitalize()} (NC{digit})", ""]
            cells = [
                (f"[{row.code}]({row.code}.md)", row.name, row.severity, row.reads, row.title)
                for row in members
            ]
            lines += markdown(("code", "name", "severity", "reads", ""), cells)
    return lines


def rule_doc(row: Row) -> list[str]:
    facts = f"{row.severity} · {row.family} · reads {row.reads} · [all rules](README.md)"
    lines = [f"# {row.code} {row.name}", "", NOTE, "", facts, "", f"**{row.title}.**"]
    for title, text in row.sections().items():
        lines += ["", f"## {title}", "", text]
    return lines


def readme() -> str:
    """README.md with its table renewed."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([LEGEND, "", *markdown(*preset_rows(RESULTS))])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


PAGES: dict[str, Callable[[], list[str]]] = {
    "formats.md": formats_doc,
    "schemes.md": schemes_doc,
    "presets.md": presets_doc,
    "cli.md": cli_doc,
    "containers.md": containers_doc,
    "gpus.md": gpus_doc,
    "engine_names.md": engines_doc,
    "rules/README.md": rules_doc,
}


def pages() -> dict[str, str]:
    """File name to text, the same on every terminal."""
    os.environ["COLUMNS"] = "80"
    lines = {name: make() for name, make in PAGES.items()}
    lines |= {f"rules/{code}.md": rule_doc(row) for code, row in rules().items()}
    made = {name: "\n".join(page).rstrip() + "\n" for name, page in lines.items()}
    return made | ({"../README.md": readme()} if README.is_file() else {})


def main(argv: Sequence[str]) -> int:
    """Write the pages below docs/, or with --check compare them."""
    made, stale = pages(), []
    for name, text in made.items():
        path = FOLDER / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    for path in (FOLDER / "rules").glob("*.md"):  # of rules that are no more
        name = f"rules/{path.name}"
        if name not in made:
            stale.append(name)
            if "--check" not in argv:
                path.unlink()
    if stale and "--check" in argv:
        print(
            f"{', '.join(stale)} in docs/ differ from the code; run python -m narrowcast.report.docs",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
