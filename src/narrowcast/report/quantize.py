"""The pages of ``narrowcast quantize``: the plan before anything is written, and what the result lost."""

from __future__ import annotations

from collections.abc import Iterable

from narrowcast.hardware.engines import ENGINES
from narrowcast.jobs.plan import Plan
from narrowcast.jobs.quantize import Result
from narrowcast.report.tables import (
    decibel,
    facts,
    hanging,
    number,
    percent,
    quantity,
    rate,
    seconds,
    size,
    table,
)
from narrowcast.tensors.metrics import Errors

CHECKED = "every element read back, and within half a step of its source or counted above"


def plan_page(plan: Plan) -> list[str]:
    """The resolved recipe: what each pattern matched, what becomes what, what stays, and the forecast."""
    lines = [*headline(plan), ""]
    if plan.resolved.matches:
        lines += [*_patterns(plan), ""]
    lines += [*_becomes(plan), "", *kept(plan), *facts(weigh(plan))]
    remarks = notes(plan)
    return [*lines, *([""] if remarks else []), *remarks, "", "Nothing was written."]


def headline(plan: Plan) -> list[str]:
    """From where to where, and as what; a conversion without a preset has the container in its title."""
    spelled = plan.title
    if plan.recipe.lines or plan.recipe.default:
        spelled += f", spelled as {plan.container}"
    if plan.formats:
        spelled += f" ({', '.join(plan.formats)})"
    return [f"{plan.model} to {plan.out}", *hanging(spelled)]


def _patterns(plan: Plan) -> list[str]:
    rows = []
    for match in plan.resolved.matches:
        line = match.line
        target = f"{line.target} ({line.rule})" if line.rule else line.target or "keep"
        rows.append((line.pattern.text, target, str(match.count), str(match.taken), ", ".join(match.names)))
    default = plan.recipe.default or "keep"
    rows.append(("everything else", default, "", "", ""))
    return table(("pattern", "target", "matched", "taken", "such as"), rows, "LlrrL", indent=2)


def _becomes(plan: Plan) -> list[str]:
    counts: dict[tuple[str, str, str], tuple[int, int]] = {}
    for unit in plan.units:
        n, k = unit.source.shape
        inputs = unit.linear.input.name if unit.linear and unit.linear.input else "-"
        key = (unit.role, unit.scheme_name, inputs)
        matrices, parameters = counts.get(key, (0, 0))
        counts[key] = (matrices + 1, parameters + n * k)
    rows = [(*key, str(matrices), quantity(parameters)) for key, (matrices, parameters) in counts.items()]
    return table(("quantized", "weights", "inputs", "matrices", "parameters"), rows, "lllrr", indent=2)


def kept(plan: Plan) -> list[str]:
    """What stays as it is, by reason, and an empty line; nothing where nothing stays."""
    rows = [(why, str(count), size(nbytes)) for why, (count, nbytes) in plan.kept.items()]
    titles = ("kept as it is, because", "tensors", "bytes")
    return [*table(titles, rows, "Lrr", indent=2), ""] if rows else []


def weigh(plan: Plan) -> list[tuple[str, str]]:
    """The forecast: coverage, size, memory, readers."""
    smaller = f"{percent(plan.forecast_bytes / plan.source_bytes)} of {size(plan.source_bytes)}"
    return [
        ("scales", _calibrated(plan)),
        ("coverage", _coverage(plan)),
        ("size", f"{plan.forecast_bytes:,} bytes ({size(plan.forecast_bytes)}, {smaller})"),
        ("memory", f"about {size(plan.peak_memory)} at most"),
        ("loaded by", _loaders(plan)),
    ]


def _calibrated(plan: Plan) -> str:
    """Which scales came from statistics, and from how much text; nothing where none did."""
    if plan.calibration is None:
        return ""
    inputs = any(unit.linear is not None and unit.linear.calibrated for unit in plan.units)
    cache = plan.calibration["kv"]
    what = " and ".join(["static inputs"] * inputs + [f"an {cache} KV cache"] * (cache is not None))
    tokens = sum(text["tokens"] for text in plan.calibration["texts"])
    return f"of {what}, from {plan.calibration['stat']} over {tokens:,} tokens"


def _coverage(plan: Plan) -> str:
    return (
        f"{percent(plan.coverage_params)} of the parameters, {percent(plan.coverage_bytes)} of the bytes; "
        f"{number(plan.bits_per_weight, 4)} bits per parameter, all included"
    )


def _loaders(plan: Plan) -> str:
    named = [name for key, name in ENGINES.items() if key in plan.engines]
    return ", ".join(named) or "no engine reads all of these formats"


def notes(plan: Plan) -> list[str]:
    """Fallbacks with their reasons, and warnings; layers with the same reason on one line."""
    lines = []
    for reason, layers in _by_reason(plan.fallbacks).items():
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        lines += hanging(f"note: {reason} ({layers[0]}{more})")
    for warning in plan.warnings:
        lines += hanging(f"note: {warning}")
    return lines


def _by_reason(fallbacks: Iterable[str]) -> dict[str, list[str]]:
    """Fallbacks read ``layer: reason``; the layers of each reason."""
    found: dict[str, list[str]] = {}
    for text in fallbacks:
        layer, _, reason = text.partition(": ")
        found.setdefault(reason, []).append(layer)
    return found


def result_page(result: Result) -> list[str]:
    """What was written and what it lost: per role, the worst tensors, coverage, sizes and seconds."""
    plan = result.plan
    lines = [*headline(plan), ""]
    lines += [*_roles(result), "", *_worst(result), ""]
    reasons = [part for reason in result.reasons for part in hanging(f"note: {reason}")]
    remarks = notes(plan) + reasons
    return [*lines, *facts(outcome(result)), *([""] if remarks else []), *remarks]


def _roles(result: Result) -> list[str]:
    matrices: dict[str, int] = {}
    for unit in result.plan.units:
        matrices[unit.role] = matrices.get(unit.role, 0) + 1
    rows = [_role(role, str(matrices[role]), errors) for role, errors in result.roles.items()]
    rows.append(_role("all", str(len(result.plan.units)), result.total))
    return table(("role", "matrices", "elements", "SQNR dB", "clipped", "to zero"), rows, "lrrrrr", indent=2)


def _role(name: str, matrices: str, errors: Errors) -> tuple[str, ...]:
    lost = (quantity(errors.clipped), quantity(errors.underflowed))
    return name, matrices, quantity(errors.elements), decibel(errors.sqnr), *lost


def _worst(result: Result) -> list[str]:
    rows = [
        (name, scheme, decibel(errors.sqnr), quantity(errors.clipped), quantity(errors.underflowed))
        for name, errors, scheme in result.worst
    ]
    titles = (f"worst {len(rows)} tensors", "scheme", "SQNR dB", "clipped", "to zero")
    return table(titles, rows, "Llrrr", indent=2)


def outcome(result: Result, checked: str = CHECKED) -> list[tuple[str, str]]:
    """Coverage, size and seconds of what was done."""
    plan = result.plan
    total = result.seconds.get("total", sum(result.seconds.values()))
    titles = {"quantize": plan.verb}
    phases = [
        f"{titles.get(name, name)} {seconds(spent)}"
        for name, spent in result.seconds.items()
        if name != "total"
    ]
    share = percent(result.bytes / plan.source_bytes)
    speed = f", {rate(plan.source_bytes / total)}" if total else ""
    return [
        ("scales", _calibrated(plan)),
        ("coverage", _coverage(plan)),
        ("size", f"{result.bytes:,} bytes ({size(result.bytes)}, {share} of {size(plan.source_bytes)})"),
        ("time", f"{seconds(total)}{speed} ({', '.join(phases)})"),
        ("checked", checked),
        ("loaded by", _loaders(plan)),
    ]
