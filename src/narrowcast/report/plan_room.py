"""What fits, on the page of ``narrowcast plan``: weights by class, modes of the cache, and how a model may be split."""

from __future__ import annotations

from narrowcast.report.tables import duration, hanging, size, table
from narrowcast.serving.plan import CacheUse, Plan
from narrowcast.serving.splits import Splits

TOKENS = "{:,}".format
# Modes of the cache that the page shows, beside the asked one; the others are named.
CACHES = (
    "bf16", "fp8_e4m3", "fp8_per_token_head", "int4_per_token_head", "nvfp4", "mxfp8", "fp4_mx_block16", "fp8_ds_mla",
)  # fmt: skip


def memory_lines(plan: Plan) -> list[str]:
    """Weights by class, then what each mode of the cache makes of the room."""
    memory = plan.memory
    classes = ", ".join(f"{name} {size(count)}" for name, count in memory.weights.items())
    gpu = " on each GPU" if plan.question.tp * plan.question.pp > 1 else ""
    lines = hanging(f"memory{gpu}: {size(memory.total)} of weights ({classes})")
    if memory.room is not None and memory.budget is not None and memory.capacity is not None:
        lines += hanging(
            f"  {size(memory.capacity)} in all, {size(memory.budget)} to be used, "
            + (f"{size(memory.room)} for the cache" if memory.room >= 0 else f"{size(-memory.room)} too few")
        )
    taken = [use for use in plan.caches if use.refusal is None]
    asked = memory.cache.mode if memory.cache is not None else ""
    shown = [use for use in taken if use.cache.mode in (asked, *CACHES)]
    titles = ("cache", "B/token", "tokens", "sequences", "step", "attention", "scales")
    if shown:
        lines += table(titles, [_cache(plan, use, asked) for use in shown], "lrrrrLl")
    other = [use.cache.mode for use in taken if use not in shown]
    refused = [use.cache.mode for use in plan.caches if use.refusal is not None]
    told = [
        f"{title}: {', '.join(modes)}"
        for title, modes in (("also", other), (f"refused on {plan.question.gpu.name}", refused)) if modes
    ]  # fmt: skip
    return [*lines, *(hanging(f"  {'; '.join(told)}") if told else [])]


def sixteen(plan: Plan, name: str) -> str:
    """The dtype that "16 bits" are on this GPU: BF16, where it has none FP16."""
    gpu = plan.question.gpu
    return "fp16" if name == "bf16" and gpu.formats and "bf16" not in gpu.formats else name


def _cache(plan: Plan, use: CacheUse, asked: str) -> tuple[str, ...]:
    cache, batch = use.cache, plan.question.batch
    held = counted(cache.sequences)
    if cache.fits is False:
        held += f" of {batch}"
    scales = {"none": "", "tensor": "per tensor", "head": "per head", "global": "global"}[cache.scales]
    mark = " *" if cache.mode == asked else ""
    return (
        f"{sixteen(plan, cache.mode)}{mark}", TOKENS(cache.token), counted(cache.tokens), held, duration(use.decode),
        use.arithmetic.replace("bf16: dequantized", "bf16"),
        scales,
    )  # fmt: skip


def counted(value: int | None) -> str:
    return "-" if value is None else TOKENS(value)


def split_lines(plan: Plan) -> list[str]:
    """Sizes that keep the model whole, and what stops the others."""
    found = plan.splits
    sizes = ", ".join(map(str, found.tp)) or "none"
    cut = [each for each in found.tp if each not in found.whole]
    whole = f" (cut off at an edge on {', '.join(map(str, cut))})" if cut else ""
    ends = f"; expert parallel: {', '.join(map(str, found.ep))}" if found.ep else ""
    stages = ", ".join(str(count) for count, layers in found.pp.items() if len(set(layers)) == 1)
    ends += f"; pipeline stages of equal length: {stages}"
    lines = hanging(f"tensor parallel: {sizes}{whole}{ends}")
    for reason, stopped in _together(found.first).items():
        lines += hanging(f"  not {', '.join(map(str, stopped))}: {reason}")
    for note, names in _copies(found).items():
        lines += hanging(f"  {', '.join(names)}: {note}")
    return [*lines, *(part for note in found.notes for part in hanging(f"  {note}"))]


def _copies(found: Splits) -> dict[str, list[str]]:
    """Notes of matrices with the names that share them; those of padding, which harms nothing, left out."""
    notes: dict[str, list[str]] = {}
    for row in found.rows:
        for note in row.notes:
            if not note.startswith("padded"):
                notes.setdefault(note, []).append(row.name.rpartition(".")[2])
    return {note: list(dict.fromkeys(names)) for note, names in notes.items()}


def _together(first: dict[int, str]) -> dict[str, list[int]]:
    """Sizes that the same matrix stops, in one line with the reason of the smallest."""
    found: dict[str, list[int]] = {}
    said: dict[str, str] = {}
    for count, reason in first.items():
        name = reason.partition(":")[0]
        found.setdefault(said.setdefault(name, reason), []).append(count)
    return found
