"""The table of presets on the page of ``narrowcast plan``, and the sentence for its head that comes of it."""

from __future__ import annotations

from narrowcast.report.tables import duration, hanging, number, table
from narrowcast.serving.choice import Choice, Option
from narrowcast.serving.evaluations import Quality

SHOWN = 5  # rows of the table; named ones and measured ones beside them
_RUNS = {
    "weight only": "weights only", "mixed": "some layers", "emulated": "emulated", "unknown": "not known",
}  # fmt: skip


def choice_lines(found: Choice) -> list[str]:
    """The first of each tie, named ones and measured ones; the rest in a line for each tie or reason."""
    named = (found.first, found.careful, found.fastest)
    known = [option for option in found.options if option.runs in ("natively", "mixed", "weight only")]
    firsts = {option.rank: option for option in reversed(known)}
    kept = [option for _, option in sorted(firsts.items())][:SHOWN]
    shown = [
        option for option in found.options
        if option in kept or option in named or (option.quality is not None and option.runs != "refused")
    ]  # fmt: skip
    titles = ("", "preset", "computes in", "step", "prompt", "tokens", "quality")
    lines = [
        *hanging(f"choice{_measure(found)}"),
        *table(
            titles, [_row(found.wide, ""), *(_row(option, f"{option.rank}") for option in shown)], "rLlrrrL"
        ),
    ]
    left = [option for option in found.options if option not in shown]
    ties = [
        f"with {one.preset}: {', '.join(other.preset for other in left if other.rank == one.rank)}"
        for one in kept if any(other.rank == one.rank for other in left)
    ]  # fmt: skip
    lines += hanging(f"  tied {'; '.join(ties)}") if ties else []
    ranks = {one.rank for one in kept}
    for reason, names in _rest([option for option in left if option.rank not in ranks]).items():
        lines += hanging(f"  {', '.join(names)}: {reason}")
    return [*lines, *(part for note in found.notes for part in hanging(f"  note: {note}"))]


def sentence(found: Choice) -> str:
    """Which one, and what to measure before another."""
    first, careful, fastest = found.first, found.careful, found.fastest
    if first is None:
        return "none of these presets runs and fits as asked"
    measured = "quality not measured" if first.quality is None else quality_words(first.quality)
    said = [f"{first.preset} first ({first.reasons[0]}; {measured})."]
    if careful is not None and careful is not first:
        why = (
            quality_words(careful.quality)
            if careful.quality is not None
            else "eight bits usually cost little"
        )
        said.append(f"Without measuring more, {careful.preset}: {why} ({careful.reasons[0]}).")
    if fastest is not None and fastest not in (first, careful) and fastest.decode and first.decode:
        share = number(100 * fastest.decode / first.decode, 2)
        said.append(
            f"{fastest.preset} has the lowest floor of a step, {share} % of that of {first.preset} "
            f"({fastest.reasons[0]}); measure before it is taken."
        )
    return " ".join(said).rstrip(".")


def _measure(found: Choice) -> str:
    """How quality comes into the table, where it is not there."""
    if all(option.quality is not None for option in (found.first, found.fastest) if option is not None):
        return ""
    return " (quality: `narrowcast evaluate MODEL --online PRESET`, then --evaluations)"


def _row(option: Option, rank: str) -> tuple[str, ...]:
    runs = option.arithmetic if option.runs == "natively" else _RUNS.get(option.runs, option.runs)
    tokens = "-" if option.tokens is None else "no room" if not option.tokens else f"{option.tokens:,}"
    if option.tokens and option.fits is False:
        tokens += ", too few"
    return (
        rank, option.preset, runs, duration(option.decode), duration(option.prefill), tokens,
        quality_words(option.quality) if rank else "the parent",
    )  # fmt: skip


def quality_words(quality: Quality | None) -> str:
    """The verdict's word and KL, or that there is none."""
    if quality is None:
        return "not measured"
    told = "" if quality.says == "measured" else f"{quality.says}, "
    return f"{told}KL {number(quality.kl, 2)}" if quality.kl is not None else quality.says


def _rest(options: list[Option]) -> dict[str, list[str]]:
    """Presets by the first of their reasons; of an engine's refusal without the exception that wraps it."""
    found: dict[str, list[str]] = {}
    for option in options:
        reason = option.reasons[0]
        if option.refusal is not None:
            reason = f"refused: {option.refusal.rpartition('scheme was found: ')[2]}"
        found.setdefault(reason, []).append(option.preset)
    return found
