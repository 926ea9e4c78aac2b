"""The pages of ``narrowcast engines``: all, one with its names and kernels, two side by side, a name in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from narrowcast.hardware import names
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.engines import ENGINES, Engine, engines
from narrowcast.hardware.names import CACHE, METHOD, VERSIONS, Factoring, Name
from narrowcast.hardware.names.changes import CHANGES
from narrowcast.hardware.names.factorings import FACTORINGS
from narrowcast.report.tables import facts, hanging, paragraph, table

BACKENDS = (names.LINEAR, names.EXPERTS, names.FP8_GEMM, names.FP4_GEMM)
TITLES = ("engine", "rows are of", "containers", "methods", "KV caches", "backends")
PLATFORMS = {"CUDA": "NVIDIA GPUs", "ROCM": "AMD GPUs", "XPU": "Intel GPUs", "CPU": "CPUs"}
LISTS = {"kv backends": "attention, {} cache", "backend kernels": "--linear-backend {}"}
# Headings of the names of a flag, by what they do.
GROUPS = {
    names.READS: "read a checkpoint",
    names.EITHER: "read a checkpoint, or quantize while loading",
    names.ONLINE: "quantize while loading",
    names.AUTO: "automatic",
    names.STORES: "store",
    names.COMPUTES: "compute in",
    names.PREFERS: "prefer kernels",
    names.ALIAS: "other words for the same",
    names.DEPRECATED: "deprecated",
    names.REFUSED: "refused",
    names.OUT: "out of scope here: other hardware, or no format of ours",
}


def read_containers(engine: Engine) -> tuple[str, ...]:
    """Containers of which the engine's rows run something, in the order of the rows."""
    running = (row.containers for row in engine.rows if row.family)
    return tuple(dict.fromkeys(name for found in running for name in found))


def engine_cells(engine: Engine) -> tuple[str, ...]:
    """One line of the table of all."""
    counts = [len(names.rows(engine.name, kind)) for kind in (METHOD, CACHE)]
    counts.append(sum(len(names.rows(engine.name, kind)) for kind in BACKENDS))
    said = [str(count) if engine.name in VERSIONS else "-" for count in counts]
    return (engine.name, engine.version, str(len(read_containers(engine))), *said)


def engines_page() -> list[str]:
    """Every engine with its version and how much is known of it."""
    return [
        *table(TITLES, [engine_cells(engine) for engine in engines.values()], "lLrrrr"),
        "",
        *paragraph(
            "containers: kinds of checkpoints of which something runs; methods, KV caches and backends: names that its "
            "flags take, each with a row. Which kernel runs on which GPU is a plan's answer."
        ),
        "",
        *paragraph(
            "`narrowcast engines vllm` shows one, `narrowcast engines vllm sglang` the same thing in both engines' "
            "words, `narrowcast engines fp8` what a name means in each."
        ),
    ]


def engine_page(engine: Engine) -> list[str]:
    """One engine: its names by flag and use, its kernels in order, and what newer versions changed."""
    versions = ", ".join(VERSIONS.get(engine.name, (engine.version,)))
    lines = [f"{engine.title} {versions}", ""]
    lines += facts([("containers", ", ".join(read_containers(engine))), ("source", engine.source)])
    for kind in names.KINDS:
        found = names.rows(engine.name, kind)
        for does, title in GROUPS.items():
            group = [row for row in found if row.does == does]
            if group:
                lines += ["", f"{group[0].flag}: {title}", *facts([(row.name, short(row)) for row in group])]
    lines += ["", f"kernels of {engine.version}, in order, whatever the GPU", *facts(families(engine))]
    changed = changes(engine.name)
    if changed:
        lines += ["", "newer versions", *facts(changed)]
    return lines


def short(row: Name) -> str:
    """What a name means, in one value of the list."""
    said = [row.means]
    if row.instead:
        said.append(f"write {row.instead}")
    if row.only and row.only not in row.means:
        said.append(f"only {row.only}")
    if row.since:
        said.append(f"since {row.since}")
    return "; ".join(said)


def families(engine: Engine) -> list[tuple[str, str]]:
    """(what a layer is, kernels in order) of each family of the engine's rows."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for row in engine.rows:
        if row.family:
            kernels = tuple(dict.fromkeys(kernel.name for kernel in row.family))
            inputs = f" ({row.inputs[0]})" if row.inputs else ""
            whose = found.setdefault(kernels, {})
            for each in row.weights or ("all",):
                whose[f"experts {each}{inputs}" if row.experts else f"{each}{inputs}"] = None
    return [(_label(tuple(whose)), ", ".join(kernels)) for kernels, whose in found.items()]


def _label(layers: tuple[str, ...]) -> str:
    """Kinds of layers in a column: the first, and how many more there are."""
    return layers[0] + (f" +{len(layers) - 1}" if len(layers) > 1 else "")


def changes(engine: str) -> list[tuple[str, str]]:
    """(version and list, what came and went and why) of the versions after the first."""
    new: dict[tuple[str, str], list[str]] = {}
    for row in names.rows(engine):
        if row.since:
            new.setdefault((row.since, row.flag), []).append(row.name)
    rows = [(f"{since} {flag}", f"new: {', '.join(found)}") for (since, flag), found in new.items()]
    for change in CHANGES:
        if change.engine == engine:
            moved = [f"new: {', '.join(change.added)}"] if change.added else []
            moved += [f"gone: {', '.join(change.removed)}"] if change.removed else []
            rows.append((f"{change.version} {place(change.where)}", f"{'; '.join(moved)}; {change.means}"))
    return rows


def place(where: str) -> str:
    """A list of the source in words: _POSSIBLE_FP8_KERNELS CPU is FP8 on CPUs."""
    name, _, rest = where.rpartition(" ")
    if name in LISTS:
        return LISTS[name].format(rest)
    what = name.removeprefix("_POSSIBLE").removesuffix("_KERNELS").strip("_").replace("_", " ")
    return f"{what or 'packed integers'} on {PLATFORMS[rest]}"


def name_page(found: Sequence[Name]) -> list[str]:
    """What one name means, in every engine and flag that has it."""
    lines: list[str] = []
    for row in found:
        lines += [] if not lines else [""]
        lines += [f"{row.title} {VERSIONS[row.engine][0]}: {row.flag} {row.name}", *facts(_about(row))]
    return lines


def _about(row: Name) -> Iterable[tuple[str, str]]:
    yield row.does, row.means
    yield "instead", row.instead
    yield "containers", ", ".join(row.containers)
    yield "weights", row.weights
    yield "inputs", row.inputs
    yield "stored", row.storage
    yield "scales", row.scales
    yield "our mode", _mode(row)
    yield "only", row.only
    yield "needs", f"compute capability {_capability(row)}" if row.low else ""
    yield "kernels" if row.kind == names.LINEAR else "backends", ", ".join(row.backends)
    yield "written by", row.writes
    yield "it says", f'"{row.says}"' if row.says else ""
    yield "since", row.since
    yield "until", row.until


def _mode(row: Name) -> str:
    """Our cache mode, with what it takes where it stores heads."""
    if row.mode not in CACHE_MODES:
        return row.mode
    mode = CACHE_MODES[row.mode]
    return (
        f"{mode.name}, {mode.head_bytes(128, 128)} bytes a token for a head of 128"
        if mode.heads
        else mode.name
    )


def factorings_page() -> list[str]:
    """The same thing in vLLM's words and in SGLang's."""
    lines = [f"vLLM {VERSIONS['vllm'][0]} and SGLang {VERSIONS['sglang'][0]}"]
    for each in FACTORINGS:
        lines += ["", *hanging(each.what), *facts(factoring_words(each))]
    return lines


def factoring_words(each: Factoring) -> list[tuple[str, str]]:
    """The words of each engine, "-" where it does not do it."""
    return [("vLLM", each.vllm or "-"), ("SGLang", each.sglang or "-"), ("note", each.note)]


def factoring_cells() -> list[tuple[str, ...]]:
    """One line of a reference page for each."""
    return [(each.what, each.vllm or "-", each.sglang or "-", each.note) for each in FACTORINGS]


def factoring_records() -> list[dict[str, Any]]:
    """The factorings for machines; null where an engine does not do a thing."""
    return [asdict(each) | {"vllm": each.vllm or None, "sglang": each.sglang or None} for each in FACTORINGS]


Cells = tuple[str, ...]


def methods_table(engine: str) -> tuple[Cells, list[Cells]]:
    """Titles and rows of everything but KV caches, for a reference page."""
    titles: Cells = (
        "flag", "name", "does", "means", "containers", "write instead", "weights", "inputs", "only", "from", "since",
    )  # fmt: skip
    rows: list[Cells] = [
        (
            f"`{row.flag}`", f"`{row.name}`", row.does, row.means, ", ".join(row.containers), row.instead,
            row.weights, row.inputs, row.only, _capability(row), row.since,
        )
        for row in names.rows(engine) if row.kind != CACHE
    ]  # fmt: skip
    return titles, rows


def caches_table(engine: str) -> tuple[Cells, list[Cells]]:
    """Titles and rows of KV caches, for a reference page."""
    titles = (
        "name",
        "does",
        "means",
        "stored",
        "scales",
        "our mode",
        "write instead",
        "attention backends",
        "since",
    )
    rows: list[Cells] = [
        (
            f"`{row.name}`", row.does, row.means, row.storage, row.scales, row.mode, row.instead,
            ", ".join(row.backends), row.since,
        )
        for row in names.rows(engine, CACHE)
    ]  # fmt: skip
    return titles, rows


def _capability(row: Name) -> str:
    return f"{row.low // 10}.{row.low % 10}" if row.low else ""


def name_record(row: Name) -> dict[str, Any]:
    """One row for machines."""
    return asdict(row) | {"flag": row.flag, "versions": [v for v in VERSIONS[row.engine] if row.holds(v)]}


def engine_record(engine: Engine) -> dict[str, Any]:
    """One engine for machines, without its names."""
    counts = {kind: len(found) for kind in names.KINDS if (found := names.rows(engine.name, kind))}
    return {
        "name": engine.name,
        "title": ENGINES[engine.name],
        "version": engine.version,
        "versions": list(VERSIONS.get(engine.name, ())),
        "containers": list(read_containers(engine)),
        "names": counts,
        "source": engine.source,
    }


def engine_details(engine: Engine) -> dict[str, Any]:
    """One engine for machines with its names, families and changes."""
    return engine_record(engine) | {
        "rows": [name_record(row) for row in names.rows(engine.name)],
        "families": [
            {"weights": label, "kernels": kernels.split(", ")} for label, kernels in families(engine)
        ],
        "changes": [asdict(change) for change in CHANGES if change.engine == engine.name],
    }
