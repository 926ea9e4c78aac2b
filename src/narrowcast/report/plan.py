"""The page of ``narrowcast plan``: the answer in words first, then what it rests on, and the command last.

Every time on it is a lower bound and says so; what is not known is said, and what nobody asked for stands among the
assumptions. Left out: what nobody looks for on a screen, which ``--json`` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from narrowcast.hardware.cost import column
from narrowcast.hardware.engines import engines
from narrowcast.report.plan_answer import headline, names, rate, sequences
from narrowcast.report.plan_choice import choice_lines
from narrowcast.report.plan_room import TOKENS, counted, memory_lines, sixteen, split_lines
from narrowcast.report.tables import duration, hanging, number, quantity, size, table
from narrowcast.serving.choice import deciding
from narrowcast.serving.memory import memory
from narrowcast.serving.paths import Attends, Kernels
from narrowcast.serving.plan import Plan
from narrowcast.serving.side_by_side import FormatRow, in_format
from narrowcast.serving.steps import Step, Steps

BARS = ("BF16", "FP8", "INT4 g128")  # formats whose memory is drawn beside the planned one
SAME = 0.01  # bars this close are one
CHANGES = 2  # of what would change a path, on the page


def plan_record(plans: Sequence[Plan]) -> dict[str, Any]:
    """One plan for machines; several under ``plans``."""
    return plans[0].to_json() if len(plans) == 1 else {"plans": [plan.to_json() for plan in plans]}


def plan_page(plan: Plan) -> list[str]:
    """At most 80 columns: the answer, choice, path, what not to do, floors, memory, splits, notes, the command."""
    blocks = [
        headline(plan),
        choice_lines(plan.choice) if plan.choice is not None else [],
        _quality(plan),
        _paths(plan),
        _cautions(plan),
        _floor(plan),
        _sides(plan),
        memory_lines(plan),
        split_lines(plan),
        _notes(plan),
        _serve(plan),
    ]
    return [line for block in blocks if block for line in (*block, "")][:-1]


def _paths(plan: Plan) -> list[str]:
    """Each set of layers with its kernel, the conditions, and what would change them; attention beside its cache."""
    lines = ["path"]
    if all(row.conditions is None for row in plan.kernels):
        words = ", ".join(dict.fromkeys(sixteen(plan, row.verdict) for row in plan.kernels))
        lines += hanging(f"  all matrices: {words}, not quantized")
    else:
        lines += [part for row in plan.kernels for part in _path(plan, row)]
    alike: dict[str, list[str]] = {}
    for kind in plan.attends:
        alike.setdefault(_attends(kind), []).append(f"{kind.attention.layers} {kind.attention.kind}")
    for said, layers in alike.items():
        lines += hanging(f"  attention, {' and '.join(layers)} layers: {said}")
    return lines


def _path(plan: Plan, row: Kernels) -> list[str]:
    if row.conditions is None:
        return hanging(f"  {names(row)}: {sixteen(plan, row.verdict)}, not quantized")
    kernel = f" ({row.path.kernels[0]})" if row.path.kernels else ""
    lines = hanging(f"  {names(row)} ({row.groups[0].scheme}): {row.verdict}{kernel}")
    lines += hanging(f"    {'; '.join(row.why)}")
    if not row.path.low_precision and row.change:
        lines += hanging(f"    would change it: {'; '.join(row.change[:CHANGES])}")
    return lines


def _attends(kind: Attends) -> str:
    attention, path = kind.attention, kind.path
    if attention.kind == "state":
        return f"a state of {TOKENS(attention.state)} elements, no cache"
    if path.refusal is not None:
        remedy = f"; would change it: {path.remedy}" if path.remedy else ""
        return f"refused: {path.refusal}{remedy}"
    backend = f" ({', '.join((path.backends[0], *_kernels(path.notes)))})" if path.backends else ""
    prompt = "" if path.prefill == path.arithmetic else f", prompts in {path.prefill}"
    return f"stored in {path.storage}, computed in {path.arithmetic}{prompt}{backend}"


def _kernels(notes: Iterable[str]) -> list[str]:
    """Notes that name what a backend calls, which stand beside its name."""
    return [note for note in notes if note.startswith("FlashAttention ") and len(note.split()) == 2]


def _floor(plan: Plan) -> list[str]:
    """Bounds of one sequence and of the batch side by side, and what they wait for."""
    question, batch = plan.question, plan.question.batch
    steps = [plan.one] if batch == 1 else [plan.one, plan.steps]
    titles = [
        "floor (at least)",
        *(f"batch {each.decode.tokens}" for each in steps),
        f"prompt of {question.context}",
    ]
    columns = [*(each.decode for each in steps), plan.steps.prefill]
    rows = [
        ("time", *(duration(step.seconds) for step in columns)),
        ("waits for", *(_waits(step) for step in columns)),
        ("reads and writes", *(size(step.traffic.moved) for step in columns)),
        ("of it weights", *(size(step.traffic.weights) for step in columns)),
        ("of it cache", *(size(step.traffic.cache_read + step.traffic.cache_written) for step in columns)),
        ("multiplies", *(f"{quantity(sum(step.traffic.flops.values()))}FLOP" for step in columns)),
    ]
    even = [*(each.decode_expected for each in steps), plan.steps.prefill_expected]
    if batch > 1 and any(even):
        rows.insert(1, ("routed evenly", *(duration(step.seconds if step else None) for step in even)))
    estimated = [step.estimate.seconds if step.estimate is not None else None for step in columns]
    if any(estimated):
        rows.append(("at measured peaks", *(duration(each) for each in estimated)))
    lines = table(titles, rows, "l" + "r" * len(columns))
    return [*lines, *(part for text in _beside(plan) for part in hanging(text))]


def _waits(step: Step) -> str:
    if step.bound.bound is None:
        return "-"
    return "bytes" if step.bound.bound == "memory" else "arithmetic"


def _beside(plan: Plan) -> Iterable[str]:
    """Crossover, experts, ridge points and what the bytes gain."""
    steps, row = plan.steps, deciding(plan.kernels)
    unknown = dict.fromkeys((*steps.decode.bound.unknown, *steps.prefill.bound.unknown))
    if unknown:
        yield f"The peak of {plan.question.gpu.name} in {', '.join(unknown)} is not known: only bytes bound the time."
    yield _crossover(steps)
    for kind in steps.experts if plan.question.batch > 1 else ():
        yield (
            f"{kind.name}: a step touches at least {kind.at_least} of {kind.experts} experts, "
            f"{number(kind.expected, 3)} when tokens are routed evenly."
        )
    ridges = ", ".join(
        f"{name} {number(value, 3)}" for name, value in steps.ridges.items() if name in _shown(plan)
    )
    if ridges:
        intensity = number(steps.decode.intensity, 3)
        yield f"Ridge points of {plan.question.gpu.name} in FLOP per byte: {ridges}; a step has {intensity}."
    if row.conditions is not None:
        yield (
            f"Against weights and cache in {plan.served.geometry.dtype} the bytes allow a step {number(steps.gain, 3)} "
            f"times as fast, {number(steps.weights_gain, 3)} times while the cache is empty."
        )


def _shown(plan: Plan) -> set[str]:
    """Columns of the peaks that bound a step and a prompt."""
    words = (*plan.steps.decode.traffic.flops, *plan.steps.prefill.traffic.flops)
    return {column(plan.question.gpu, word) for word in words}


def _crossover(steps: Steps) -> str:
    if steps.crossover is not None:
        return (
            f"From batch {TOKENS(steps.crossover)} on a step waits for arithmetic; below it fewer bits make it faster, "
            "and quantized inputs do not."
        )
    if steps.crossover_weights is None:
        return "From which batch on a step waits for arithmetic is not known."
    return (
        f"A step waits for bytes at any batch (with an empty cache up to about {TOKENS(steps.crossover_weights)}): "
        "fewer bits make it faster, quantized inputs do not."
    )


def _sides(plan: Plan) -> list[str]:
    """Formats beside each other: matrices of the linears in them, the rest wide, as presets write it."""
    sides = plan.sides
    rows = [row for row in sides.rows if row.covers == "linears" or row.name in ("FP32", "BF16")]
    titles = ("linears in", "weights", "step", "tokens/s", "prompt", "gain", "products")
    lines = table(titles, [_side(row) for row in rows], "lrrrrrL")
    head = (
        f"formats: what bytes and {sides.gpu} allow at batch {sides.batch}, token {TOKENS(sides.context)}, with a "
        f"{sixteen(plan, sides.cache)} cache, whether or not the engine has the kernel"
    )
    if plan.steps.experts and sides.batch > 1:
        head += "; gain with tokens routed evenly"
    return [*hanging(head), *lines]


def _side(row: FormatRow) -> tuple[str, ...]:
    return (
        row.name, size(row.weights), duration(row.decode), rate(row.tokens_per_second), duration(row.prefill),
        f"{row.gain:.2f}x", row.arithmetic if row.how in ("native", "as stored") else f"{row.arithmetic}, weight only",
    )  # fmt: skip


def _quality(plan: Plan) -> list[str]:
    found = plan.quality
    return hanging(f"quality: {found.sentence} ({found.source})") if found is not None else []


def _cautions(plan: Plan) -> list[str]:
    """What not to do, why, and what instead; without what the floor or the table of presets says."""
    said = ("arithmetic-at-small-batch", *(["emulated"] if plan.choice is not None else []))
    lines = []
    for caution in (one for one in plan.cautions if one.name not in said):
        lines += hanging(f"  {caution.what}: {caution.why}. Instead: {caution.instead}.")
    return ["not to do", *lines] if lines else []


def _serve(plan: Plan) -> list[str]:
    """The command; `narrowcast serve` says why each flag is there."""
    made = plan.command
    if made is None:
        return []
    lines = ["serve", *(f"  {line}" for line in (*made.before, *made.lines()))]
    first = plan.choice.first if plan.choice is not None else None
    if first is not None and plan.served.preset is None:
        lines += hanging(
            f"  with {first.preset}: the same plan or `narrowcast serve` with --preset {first.preset}"
        )
    # What the head and the list of what not to do have said already.
    warnings = [
        text for text in made.warnings if "shows what does" not in text and "brings no scales" not in text
    ]
    for title, texts in (("refused", made.refusals), ("careful", warnings)):
        lines += [part for text in texts for part in hanging(f"  {title}: {text}")]
    return lines


def _notes(plan: Plan) -> list[str]:
    """Assumptions, then what the parts have to say: the model, paths, attention, the GPU."""
    gpu = plan.question.gpu
    assumed = dict.fromkeys((*plan.assumed, *plan.memory.assumptions, *plan.steps.assumptions))
    notes = [*plan.served.notes, *(note for row in plan.kernels for note in row.notes)]
    notes += [note for kind in plan.attends for note in kind.path.notes if note not in _kernels((note,))]
    notes += gpu.notes_about("memory", "bandwidth")
    lines = hanging(f"assumed: {' '.join(_sentence(text) for text in assumed)}")
    return [*lines, *(part for note in dict.fromkeys(notes) for part in hanging(f"note: {note}"))]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def plans_page(plans: Sequence[Plan]) -> list[str]:
    """Several GPUs, a line each; each one's own plan is a command away."""
    first = plans[0]
    context, batch = first.question.context, first.question.batch
    rows = [_compared(plan) for plan in plans]
    titles = ("GPU", "computes in", "fits", "tokens", "step", "tokens/s", "prompt", "gain")
    model = Path(first.served.name).name + (f" as {first.served.preset}" if first.served.preset else "")
    head = f"{model}, {sequences(batch)} at token {TOKENS(context)}, {engines[first.question.engine].title}"
    return [
        *hanging(head), *table(titles, rows, "LLlrrrrr"),
        *hanging(
            "Times are lower bounds. gain: what the bytes of a step allow over weights and cache in "
            f"{first.served.geometry.dtype}. One --gpu gives the whole plan."
        ),
    ]  # fmt: skip


def _compared(plan: Plan) -> tuple[str, ...]:
    row, step = deciding(plan.kernels), plan.steps.decode.seconds
    fits = {None: "-", True: "yes", False: "no"}[plan.memory.fits]
    if row.path.refusal is not None:
        return plan.question.gpu.name, "refused", fits, "-", "-", "-", "-", "-"
    runs = row.path.arithmetic.replace("bf16: ", "")
    return (
        plan.question.gpu.name, runs, fits, counted(plan.memory.tokens), duration(step),
        rate(plan.question.batch / step if step else None), duration(plan.steps.prefill.seconds),
        f"{plan.steps.gain:.2f}x",
    )  # fmt: skip


def write_figure(plan: Plan, file: str) -> None:
    """The roofline of the model, and its memory beside that of formats that weigh otherwise, in one SVG or PNG."""
    from narrowcast.report.plan_figures import plot_plan

    served, question = plan.served, plan.question
    plain = served.container == "plain" and served.geometry.dtype == "bf16"
    named = {served.preset or ("BF16" if plain else "as it is"): plan.memory}
    for name in BARS:
        other = memory(in_format(served, name), question)
        if abs(other.total - plan.memory.total) > SAME * plan.memory.total:
            named[name] = other
    plot_plan(served, question, named, file)
