"""The table of presets on the page of ``narrowcast plan``, and the sentence that comes of it."""

from __future__ import annotations

from narrowcast.report.tables import duration, hanging, number, table
from narrowcast.serving.choice import Choice, Option
from narrowcast.serving.evaluations import Quality

SHOWN = 10  # rows of the table; named ones and measured ones beside them
_RUNS = {
    "weight only": "weights only", "mixed": "some layers", "emulated": "emulated", "unknown": "not known",
}  # fmt: skip


def choice_lines(found: Choice) -> list[str]:
    """Options in their order, the rest of them and the refused ones in a line for each reason."""
    named = (found.first, found.careful, found.fastest)
    able = [option for option in found.options if option.runs != "refused"]
    shown = [
        option for i, option in enumerate(able) if i < SHOWN or option in named or option.quality is not None
    ]
    titles = ("", "preset", "computes in", "step", "prompt", "tokens", "quality")
    lines = [
        *hanging(f"choice: {sentence(found)}"),
        *table(
            titles, [_row(found.wide, ""), *(_row(option, f"{option.rank}") for option in shown)], "rLlrrrL"
        ),
    ]
    for reason, names in _rest(found.options, shown).items():
        lines += hanging(f"  {', '.join(names)}: {reason}")
    return [*lines, *(part for note in found.notes for part in hanging(f"  note: {note}"))]


def sentence(found: Choice) -> str:
    """Which one, and what to measure before another."""
    first, careful, fastest = found.first, found.careful, found.fastest
    if first is None:
        return "none of these presets runs and fits here."
    said = [f"{first.preset} first ({'; '.join(first.reasons)})."]
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
    if any(option.quality is None for option in (first, fastest) if option is not None):
        said.append(
            "`narrowcast evaluate MODEL --online PRESET` measures quality, --evaluations brings it here."
        )
    return " ".join(said)


def _row(option: Option, rank: str) -> tuple[str, ...]:
    runs = option.arithmetic if option.runs == "natively" else _RUNS.get(option.runs, option.runs)
    tokens = "-" if option.tokens is None else f"{option.tokens:,}" if option.fits else "no room"
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


def _rest(options: tuple[Option, ...], shown: list[Option]) -> dict[str, list[str]]:
    """Presets that are not in the table, by the first of their reasons."""
    found: dict[str, list[str]] = {}
    for option in options:
        if option not in shown:
            found.setdefault(option.reasons[0], []).append(option.preset)
    return found
