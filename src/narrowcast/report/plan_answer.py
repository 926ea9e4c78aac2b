"""The head of the page of ``narrowcast plan``: what was asked, answered in a few labelled sentences.

    starts   only where it does not, with the engine's reason
    fits     yes or no, the room, and what would make it fit
    runs     the arithmetic of the layers that hold most parameters, and of attention over its cache
    speed    the bounds of the asked batch and of a prompt, and what the bytes gain over 16 bits
    choose   the preset that comes first, where presets are compared
    avoid    what not to do with this model on this GPU, of which the page says why

Left out: everything that these sentences rest on, which is the rest of the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from narrowcast.hardware.engines import engines
from narrowcast.model.roles import Role
from narrowcast.report.plan_choice import sentence
from narrowcast.report.plan_room import CACHES, TOKENS, sixteen
from narrowcast.report.tables import duration, facts, hanging, number, size
from narrowcast.serving.choice import deciding
from narrowcast.serving.paths import Kernels
from narrowcast.serving.plan import Plan

# Of what not to do, what holds whatever is chosen and what "starts" says; the head leaves it to the page.
_ALWAYS = ("old-fp8-name", "arithmetic-at-small-batch", "latent-replicated", "cut-by-ranks")


def headline(plan: Plan) -> list[str]:
    """What was asked and the answer."""
    return [*hanging(subject(plan)), *facts(_answers(plan))]


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


def _answers(plan: Plan) -> Iterator[tuple[str, str]]:
    refusal = deciding(plan.kernels).path.refusal or plan.splits.first.get(plan.question.tp)
    if refusal is not None:
        yield "starts", f"no: {refusal}"
    yield "fits", _fits(plan)
    if refusal is None:
        yield "runs", _runs(plan)
        yield "speed", _bounds(plan)
    yield "choose", sentence(plan.choice) if plan.choice is not None else ""
    yield "avoid", "; ".join(one.what.partition(" (")[0] for one in plan.cautions if one.name not in _ALWAYS)


def _fits(plan: Plan) -> str:
    """Whether weights and the asked batch fit, how much room there is, and what would make it fit."""
    memory, question = plan.memory, plan.question
    cache = memory.cache
    if memory.room is None or memory.budget is None:
        return f"not known: the memory of {question.gpu.name} is not"
    weights = f"{size(memory.total)} of weights in {size(memory.budget)}"
    if question.tp * question.pp > 1:
        weights += " on each GPU"
    if memory.room <= 0:
        return f"no: {weights}{_would_fit(plan)}"
    if cache is None or cache.tokens is None:
        why = "it keeps no keys" if cache is not None else "what it keeps of its context is not known"
        return f"its weights do: {weights}, {size(memory.room)} are left; {why}"
    room = f"{weights} leave room for {TOKENS(cache.tokens)} tokens of {sixteen(plan, cache.mode)} cache"
    if cache.fits:
        return f"yes: {room}, {sequences(cache.sequences or 0)} of {TOKENS(question.context)}"
    if question.batch == 1:
        longest = f", {TOKENS(cache.longest)} in one sequence" if cache.longest is not None else ""
        return f"no: {room}{longest}, not {TOKENS(question.context)}{_would_fit(plan)}"
    held = f"{sequences(cache.sequences or 0)} of {TOKENS(question.context)}, not {question.batch}"
    return f"no: {room}, {held}{_would_fit(plan)}"


def _would_fit(plan: Plan) -> str:
    """More GPUs, another mode of the cache, a preset, or a preset with another mode: the first of each."""
    taken = [use.cache.mode for use in plan.caches if use.refusal is None and use.cache.mode in CACHES]
    fitting = next(
        (use.cache.mode for use in plan.caches if use.cache.fits and use.cache.mode in taken), None
    )
    wider = plan.memory.smallest
    ways = [f"--tp {wider}"] * (wider != plan.question.tp and wider in plan.splits.tp)
    ways += [f"--kv {fitting}"] * (fitting is not None)
    if plan.choice is not None and not plan.choice.wide.fits:
        first = plan.choice.first
        ways += [f"--preset {first.preset}"] if first is not None else _with_cache(plan, taken)
    return f"; {', or '.join(ways)} would fit" if ways else ""


def _with_cache(plan: Plan, taken: list[str]) -> list[str]:
    """The first preset that runs and would fit with another mode of the cache, and the first such mode."""
    able = [one for one in plan.choice.options if one.runnable] if plan.choice is not None else []
    for one in sorted(able, key=lambda one: one.runs != "natively"):
        mode = next((mode for mode in taken if mode in one.caches), None)
        if mode is not None:
            return [f"--preset {one.preset} --kv {mode}"]
    return []


def sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{TOKENS(count)} sequences"


def _runs(plan: Plan) -> str:
    """What the deciding layers compute in, and attention beside its cache."""
    row = deciding(plan.kernels)
    kernel = f" ({row.path.kernels[0]})" if row.path.kernels else ""
    said = (
        f"nothing is quantized, products are in {sixteen(plan, row.path.arithmetic)}"
        if row.conditions is None
        else f"{row.verdict}{kernel}: {names(row)}"
    )
    attention = dict.fromkeys(
        f"attention in {each.path.arithmetic.partition(':')[0]} over its cache in {each.path.storage}"
        for each in plan.attends if each.attention.kind != "state" and each.path.refusal is None
    )  # fmt: skip
    return "; ".join((said, *attention))


def names(row: Kernels) -> str:
    """The layers' names; those of experts are marked, since dense layers have the same."""
    experts = all(group.matrix.role is Role.EXPERT for group in row.groups)
    return ("experts' " if experts else "") + ", ".join(row.names)


def _bounds(plan: Plan) -> str:
    """The bounds of the asked batch, and of a prompt."""
    batch, context, found = plan.question.batch, plan.question.context, plan.steps
    step, prompt = found.decode.seconds, found.prefill.seconds
    if step is None:
        return f"not known: no bandwidth of {plan.question.gpu.name} is"
    each = f"{rate(1 / step)} tokens/s"
    together = f"{each} each, {rate(batch / step)} together" if batch > 1 else each
    told = (
        f"a step of {sequences(batch)} at token {TOKENS(context)} takes at least {duration(step)} "
        f"(at most {together})"
    )
    if batch > 1 and found.decode_expected is not None:
        told += f", {duration(found.decode_expected.seconds)} when tokens are routed evenly over the experts"
    alone = " for its bytes alone" if found.prefill.bound.unknown else ""
    told += f"; a prompt of {TOKENS(context)} at least {duration(prompt)}{alone}"
    if deciding(plan.kernels).conditions is not None:
        wide = plan.served.geometry.dtype
        told += f"; the bytes allow {number(found.gain, 3)} times the speed of weights and cache in {wide}"
    return told


def rate(value: float | None) -> str:
    """Tokens a second in three digits, whole from 100 on."""
    return "-" if value is None else f"{value:,.0f}" if value >= 99.95 else number(value, 3)
