"""The page of ``narrowcast plan``: the answer in words first, then what it rests on.

Every time on it is a lower bound and says so; what is not known is said, and what nobody asked for stands among the
assumptions at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from narrowcast.hardware.cost import column
from narrowcast.hardware.engines import engines
from narrowcast.model.roles import Role
from narrowcast.report.plan_choice import choice_lines
from narrowcast.report.plan_room import TOKENS, counted, memory_lines, split_lines
from narrowcast.report.tables import duration, hanging, number, quantity, size, table
from narrowcast.serving.choice import deciding
from narrowcast.serving.memory import memory
from narrowcast.serving.paths import Attends, Kernels
from narrowcast.serving.plan import Plan
from narrowcast.serving.side_by_side import FormatRow, in_format
from narrowcast.serving.steps import Step, Steps

BARS = ("BF16", "FP8", "INT4 g128")  # formats whose memory is drawn beside the planned one
CHANGES = 2  # of what would change a path, on the page


def plan_record(plans: Sequence[Plan]) -> dict[str, Any]:
    """One plan for machines; several under ``plans``."""
    return plans[0].to_json() if len(plans) == 1 else {"plans": [plan.to_json() for plan in plans]}


def plan_page(plan: Plan) -> list[str]:
    """At most 80 columns: the answer, path, floor, memory, splits, choice, what not to do, the command, notes."""
    blocks = [
        headline(plan),
        _paths(plan),
        _floor(plan),
        _sides(plan),
        memory_lines(plan),
        split_lines(plan),
        choice_lines(plan.choice) if plan.choice is not None else [],
        _quality(plan),
        _cautions(plan),
        _serve(plan),
        _notes(plan),
    ]
    return [line for block in blocks if block for line in (*block, "")][:-1]


def subject(plan: Plan) -> str:
    """The model, how it would be written, the GPUs and the engine."""
    question, served = plan.question, plan.served
    written = (
        f" as {served.preset}"
        if served.preset
        else ""
        if served.container == "plain"
        else f" ({served.container})"
    )
    count = question.tp * question.pp
    spread = [f"TP {question.tp}"] * (question.tp > 1) + [f"PP {question.pp}"] * (question.pp > 1)
    spread += ["EP"] * question.ep
    gpus = f"{count} x {question.gpu.name}" if count > 1 else question.gpu.name
    how = f" ({', '.join(spread)})" if spread else ""
    engine = engines[question.engine]
    return f"{Path(served.name).name or served.name}{written} on {gpus}{how}, {engine.title} {engine.version}"


def headline(plan: Plan) -> list[str]:
    """What fits, what really runs in low precision, and how fast it can be at most."""
    starts = deciding(plan.kernels).path.refusal is None and plan.question.tp in plan.splits.tp
    said = " ".join((_fits(plan), _runs(plan), *([_bounds(plan)] if starts else [])))
    return [*hanging(f"{subject(plan)}"), *hanging(f"  {said}")]


def _runs(plan: Plan) -> str:
    """What the deciding layers compute in."""
    row = deciding(plan.kernels)
    kernel = f" ({row.path.kernels[0]})" if row.path.kernels else ""
    refusal = row.path.refusal or plan.splits.first.get(plan.question.tp)
    if refusal is not None:
        return f"It does not start: {refusal}."
    if row.conditions is None:
        return f"Nothing is quantized: products are in {row.path.arithmetic}."
    return f"{_names(row)}: {row.verdict}{kernel}."


def _bounds(plan: Plan) -> str:
    """The bounds of the asked batch, and of a prompt."""
    batch, context = plan.question.batch, plan.question.context
    step, prompt = plan.steps.decode.seconds, plan.steps.prefill.seconds
    if step is None:
        return f"How fast it can be is not known: no bandwidth of {plan.question.gpu.name} is."
    each = f"{_rate(1 / step)} tokens/s"
    together = f"{each} each, {_rate(batch / step)} together" if batch > 1 else each
    of = _sequences(batch)
    told = f"A step of {of} at token {TOKENS(context)} takes at least {duration(step)} (at most {together})"
    return f"{told}, a prompt of {TOKENS(context)} at least {duration(prompt)}."


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"


def _paths(plan: Plan) -> list[str]:
    """Each set of layers with its kernel, the conditions, and what would change them; attention beside its cache."""
    lines = ["path"]
    wide = all(row.conditions is None for row in plan.kernels)
    for row in plan.kernels:
        lines += hanging(f"  all matrices: {row.verdict}, not quantized") if wide else _path(row)
    for kind in plan.attends:
        lines += _attends(kind)
    return lines


def _path(row: Kernels) -> list[str]:
    names = _names(row)
    if row.conditions is None:
        return hanging(f"  {names}: {row.verdict}, {'; '.join(row.why)}")
    kernel = f" ({row.path.kernels[0]})" if row.path.kernels else ""
    lines = hanging(f"  {names} ({row.groups[0].scheme}): {row.verdict}{kernel}")
    lines += [part for why in row.why for part in hanging(f"    {why}")]
    if not row.path.low_precision:
        lines += [part for text in row.change[:CHANGES] for part in hanging(f"    would change it: {text}")]
    return lines


def _names(row: Kernels) -> str:
    """The layers' names; those of experts are marked, since dense layers have the same."""
    experts = all(group.matrix.role is Role.EXPERT for group in row.groups)
    return ("experts' " if experts else "") + ", ".join(row.names)


def _attends(kind: Attends) -> list[str]:
    attention, path = kind.attention, kind.path
    what = f"  attention, {attention.layers} {attention.kind} layers"
    if attention.kind == "state":
        return hanging(f"{what}: a state of {TOKENS(attention.state)} elements, no cache")
    if path.refusal is not None:
        remedy = f"; would change it: {path.remedy}" if path.remedy else ""
        return hanging(f"{what}: refused: {path.refusal}{remedy}")
    backend = f" ({path.backends[0]})" if path.backends else ""
    prompt = "" if path.prefill == path.arithmetic else f", prompts in {path.prefill}"
    return hanging(f"{what}: stored in {path.storage}, computed in {path.arithmetic}{prompt}{backend}")


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
    estimated = [step.estimate.seconds if step.estimate is not None else None for step in columns]
    if any(estimated):
        rows.append(("at measured peaks", *(duration(each) for each in estimated)))
    lines = table(titles, rows, "l" + "r" * len(columns))
    return [*lines, *(part for text in _beside(plan) for part in hanging(text))]


def _rate(value: float | None) -> str:
    """Tokens a second in three digits, whole from 100 on."""
    return "-" if value is None else f"{value:,.0f}" if value >= 99.95 else number(value, 3)


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
    for kind in steps.experts:
        yield (
            f"{kind.name}: a step touches at least {kind.at_least} of {kind.experts} experts, "
            f"{number(kind.expected, 3)} under uniform routing (then "
            f"{duration(steps.decode_expected.seconds if steps.decode_expected else None)})"
        )
    ridges = ", ".join(
        f"{name} {number(value, 3)}" for name, value in steps.ridges.items() if name in _shown(plan)
    )
    if ridges:
        intensity = number(steps.decode.intensity, 3)
        yield f"Ridge points of {plan.question.gpu.name} in FLOP per byte: {ridges}; a step has {intensity}."
    if row.conditions is not None:
        yield (
            f"Against weights in {plan.served.geometry.dtype} the bytes allow a step to be {number(steps.gain, 3)} "
            f"times as fast here, {number(steps.weights_gain, 3)} times with an empty cache."
        )


def _shown(plan: Plan) -> set[str]:
    """Columns of the peaks that bound a step and a prompt."""
    words = (*plan.steps.decode.traffic.flops, *plan.steps.prefill.traffic.flops)
    return {column(plan.question.gpu, word) for word in words}


def _crossover(steps: Steps) -> str:
    if steps.crossover is not None:
        return f"From batch {TOKENS(steps.crossover)} on a step waits for arithmetic instead of bytes."
    if steps.crossover_weights is None:
        return "From which batch on a step waits for arithmetic is not known."
    return (
        f"With an empty cache a step waits for arithmetic from batch {TOKENS(steps.crossover_weights)} on; at this "
        "context never, as each sequence brings more bytes of its own than arithmetic."
    )


def _sides(plan: Plan) -> list[str]:
    """Formats beside each other: matrices of the linears in them, the rest wide, as presets write it."""
    sides = plan.sides
    rows = [row for row in sides.rows if row.covers == "linears" or row.name in ("FP32", "BF16")]
    titles = ("linears in", "weights", "step", "tokens/s", "prompt", "gain", "products")
    lines = table(titles, [_side(row) for row in rows], "lrrrrrL")
    head = f"formats (floors at batch {sides.batch}, token {TOKENS(sides.context)}, {sides.cache} cache)"
    return [*hanging(head), *lines]


def _side(row: FormatRow) -> tuple[str, ...]:
    return (
        row.name, size(row.weights), duration(row.decode), _rate(row.tokens_per_second), duration(row.prefill),
        f"{row.gain:.2f}x", row.arithmetic if row.how in ("native", "as stored") else f"{row.arithmetic}, weight only",
    )  # fmt: skip


def _fits(plan: Plan) -> str:
    """Whether weights and the asked batch fit, and how much room there is."""
    memory, question = plan.memory, plan.question
    cache = memory.cache
    if memory.room is None or memory.budget is None:
        return f"Whether it fits is not known: the memory of {question.gpu.name} is not."
    weights = f"{size(memory.total)} of weights in {size(memory.budget)}"
    if question.tp * question.pp > 1:
        weights += " on each GPU"
    enough = (
        f" It would fit with --tp {memory.smallest}." if memory.smallest not in (None, question.tp) else ""
    )
    if memory.room <= 0:
        return f"It does not fit: {weights}.{enough}"
    if cache is None or cache.tokens is None:
        why = "it keeps no keys" if cache is not None else "what it keeps of its context is not known"
        return f"Its weights fit: {weights}, {size(memory.room)} are left; {why}."
    room = f"{weights} leave room for {TOKENS(cache.tokens)} tokens of {cache.mode} cache"
    if not cache.fits:
        of = (
            f"{question.batch} sequences of {TOKENS(question.context)} tokens"
            if question.batch > 1
            else "one sequence"
        )
        longest = (
            f", {TOKENS(cache.longest)} in one" if question.batch == 1 and cache.longest is not None else ""
        )
        return f"It does not fit: {room}{longest}, too few for {of}.{enough}"
    return f"It fits: {room}, {TOKENS(cache.sequences or 0)} sequences of {TOKENS(question.context)}."


def _quality(plan: Plan) -> list[str]:
    found = plan.quality
    return hanging(f"quality: {found.sentence} ({found.source})") if found is not None else []


def _cautions(plan: Plan) -> list[str]:
    """What not to do, why, and what instead."""
    lines = []
    for caution in plan.cautions:
        lines += hanging(f"  {caution.what}: {caution.why}. Instead: {caution.instead}.")
    return ["not to do", *lines] if lines else []


def _serve(plan: Plan) -> list[str]:
    """The command; `narrowcast serve` says why each flag is there."""
    made = plan.command
    if made is None:
        return []
    lines = ["serve", *(f"  {line}" for line in (*made.before, *made.lines()))]
    for title, texts in (("refused", made.refusals), ("careful", made.warnings)):
        lines += [part for text in texts for part in hanging(f"  {title}: {text}")]
    return lines


def _notes(plan: Plan) -> list[str]:
    """Assumptions, then what the parts have to say: the model, paths, attention, the GPU."""
    gpu = plan.question.gpu
    assumed = dict.fromkeys((*plan.assumed, *plan.memory.assumptions, *plan.steps.assumptions))
    notes = [*plan.served.notes, *(note for row in plan.kernels for note in row.notes)]
    notes += [note for kind in plan.attends for note in kind.path.notes]
    notes += gpu.notes_about("memory", "bandwidth")
    lines = ["assumed", *(part for text in assumed for part in hanging(f"  {text.rstrip('.')}"))]
    unique = dict.fromkeys(notes)
    return [
        *lines,
        *(["notes"] if unique else []),
        *(part for note in unique for part in hanging(f"  {note}")),
    ]


def plans_page(plans: Sequence[Plan]) -> list[str]:
    """Several GPUs, a line each; each one's own plan is a command away."""
    first = plans[0]
    context, batch = first.question.context, first.question.batch
    rows = [_compared(plan) for plan in plans]
    titles = ("GPU", "computes in", "fits", "tokens", "step", "tokens/s", "prompt")
    model = Path(first.served.name).name + (f" as {first.served.preset}" if first.served.preset else "")
    head = f"{model}, {_sequences(batch)} at token {TOKENS(context)}, {engines[first.question.engine].title}"
    return [
        *hanging(head), *table(titles, rows, "LLlrrrr"),
        *hanging("Times are lower bounds. One --gpu gives the whole plan."),
    ]  # fmt: skip


def _compared(plan: Plan) -> tuple[str, ...]:
    row, step = deciding(plan.kernels), plan.steps.decode.seconds
    fits = {None: "-", True: "yes", False: "no"}[plan.memory.fits]
    if row.path.refusal is not None:
        return plan.question.gpu.name, "refused", fits, "-", "-", "-", "-"
    runs = row.path.arithmetic.replace("bf16: ", "")
    return (
        plan.question.gpu.name, runs, fits, counted(plan.memory.tokens), duration(step),
        _rate(plan.question.batch / step if step else None), duration(plan.steps.prefill.seconds),
    )  # fmt: skip


def write_figure(plan: Plan, file: str) -> None:
    """The roofline of the model, and its memory beside that of other formats, in one SVG or PNG."""
    from narrowcast.report.plan_figures import plot_plan

    served, question = plan.served, plan.question
    plain = served.container == "plain" and served.geometry.dtype == "bf16"
    named = {served.preset or ("BF16" if plain else "as it is"): plan.memory}
    for name in BARS:
        named.setdefault(name, memory(in_format(served, name), question))
    plot_plan(served, question, named, file)
