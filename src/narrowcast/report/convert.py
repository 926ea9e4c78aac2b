"""The pages of ``narrowcast convert``: what every matrix was, what it becomes, and what is lost on the way."""

from __future__ import annotations

from narrowcast.jobs.coded import Coded
from narrowcast.jobs.export import Exported
from narrowcast.jobs.gguf import GGUFResult
from narrowcast.jobs.parent import rounded_again
from narrowcast.jobs.plan import Plan, Unit
from narrowcast.jobs.quantize import Result
from narrowcast.report.quantize import headline, kept, notes, outcome, weigh
from narrowcast.report.tables import decibel, facts, hanging, quantity, table
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.storage import same_storage

SHOWN = 20  # matrices of a long list
CHECKED = "every element read back: moved ones equal bit for bit, rounded ones within half a step or counted"


def plan_page(plan: Plan) -> list[str]:
    """What becomes what and how, what stays, and the forecast."""
    rows = [(*key, str(len(units)), quantity(_elements(units))) for key, units in _groups(plan).items()]
    lines = [*headline(plan), ""]
    if rows:
        lines += [
            *table(("role", "from", "to", "how", "matrices", "parameters"), rows, "llllrr", indent=2),
            "",
        ]
    lines += [*kept(plan), *facts(weigh(plan))]
    remarks = notes(plan)
    return [*lines, *([""] if remarks else []), *remarks, "", "Nothing was written."]


def result_page(result: Result) -> list[str]:
    """What was moved, decoded or rounded again, and what that lost."""
    plan = result.plan
    rows = []
    for (role, before, after, how), units in _groups(plan).items():
        errors = sum((result.tensors[unit.module] for unit in units), Errors())
        lost = decibel(errors.sqnr) if units[0].step != "decode" else ""
        rows.append((role, before, after, how, str(len(units)), quantity(_elements(units)), lost))
    lines = [*headline(plan), ""]
    if rows:
        titles = ("role", "from", "to", "how", "matrices", "elements", "SQNR dB")
        lines += [*table(titles, rows, "llllrrr", indent=2), ""]
    lines += _losses(result)
    reasons = [part for reason in result.reasons for part in hanging(f"note: {reason}")]
    remarks = notes(plan) + _second_rounding(result) + reasons
    return [*lines, *facts(outcome(result, CHECKED)), *([""] if remarks else []), *remarks]


def onnx_page(exported: Exported) -> list[str]:
    """What an ONNX file holds."""
    rows = [(name, scheme, "x".join(map(str, shape))) for name, (scheme, shape) in exported.matrices.items()]
    few = rows if len(rows) <= SHOWN else rows[:SHOWN]
    more = [f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    lines = [*table(("matrix", "scheme", "shape"), few, "Llr", indent=2), *more, ""]
    size = f"{exported.nbytes:,} bytes, {len(rows)} matrices, each an output of its decoded value"
    return [f"{exported.out}", "", *lines, *facts([("size", size)])]


def gguf_page(written: GGUFResult) -> list[str]:
    """What a GGUF file holds, and what that lost."""
    rows = [(*key, str(count)) for key, count in written.matrices.items()]
    size = f"{written.nbytes:,} bytes, architecture {written.architecture}, config and vocabulary inside"
    shown = [
        ("size", size),
        ("rounding", f"{decibel(written.errors.sqnr)} dB" if written.errors.noise else "none"),
        ("checked", "every byte read back and compared by checksum, and the file opened as a model"),
    ]
    remarks = [part for note in written.notes for part in hanging(f"note: {note}")]
    lines = [f"{written.out}", "", *table(("from", "type", "how", "matrices"), rows, "lllr", indent=2), ""]
    return [*lines, *facts(shown), *([""] if remarks else []), *remarks]


def how_it_moves(unit: Unit) -> str:
    """What a conversion does to a matrix, in a word or two."""
    source = unit.source
    if unit.step == "decode":
        return "decoded" if isinstance(source, Coded) else "cast"
    if unit.step == "recode":
        assert isinstance(source, Coded)
        return "as it is" if same_storage(source.how.scheme, unit.how.scheme) else "same values"
    return "rounded again" if isinstance(source, Coded) else "quantized"


def _groups(plan: Plan) -> dict[tuple[str, str, str, str], list[Unit]]:
    found: dict[tuple[str, str, str, str], list[Unit]] = {}
    for unit in plan.units:
        source = unit.source
        before = source.how.scheme.name if isinstance(source, Coded) else unit.dtype.name
        found.setdefault((unit.role, before, unit.scheme_name, how_it_moves(unit)), []).append(unit)
    return found


def _elements(units: list[Unit]) -> int:
    return sum(unit.source.shape[0] * unit.source.shape[1] for unit in units)


def _losses(result: Result) -> list[str]:
    """SQNR of the first rounding, the second, both, and of starting from the parent."""
    rows = [
        (role, *(decibel(getattr(loss, name).sqnr) for name in ("first", "second", "both", "straight")))
        for role, loss in result.losses.items()
    ]
    titles = ("SQNR dB of", "first rounding", "second", "both", "straight from the parent")
    return [*table(titles, rows, "lrrrr", indent=2), ""] if rows else []


def _second_rounding(result: Result) -> list[str]:
    again = rounded_again(result.plan)
    if not again or result.losses:
        return []
    errors = sum((result.tensors[unit.module] for unit in again), Errors())
    return hanging(
        f"note: {len(again)} matrices were rounded a second time, at {decibel(errors.sqnr)} dB beside what the "
        "first rounding lost; --parent MODEL shows both beside starting from the parent"
    )
