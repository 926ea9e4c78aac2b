"""The pages of ``narrowcast serve``: the command with a reason for each flag, and what is really running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from narrowcast.doctor import Report
from narrowcast.doctor.rows import NAMES
from narrowcast.report.doctor import doctor_page
from narrowcast.report.tables import hanging, table
from narrowcast.serving.beside import Beside
from narrowcast.serving.command import Command


def command_page(command: Command) -> list[str]:
    """What the engine would refuse, what to run first, the command, why each flag is there, and what to know."""
    lines = [part for text in command.refusals for part in (*hanging(f"refused: {text}"), "")]
    if command.before:
        lines += ["first:", *(f"  {line}" for line in command.before), ""]
    for name, text in command.files.items():
        lines += [f"{name}:", *(f"  {line}" for line in text.splitlines()), ""]
    lines += [*command.lines(), "", *_reasons(command)]
    for text in command.warnings:
        lines += ["", *hanging(f"careful: {text}")]
    return lines


def _reasons(command: Command) -> Iterator[str]:
    yield f"Flags as in {NAMES[command.engine]} {command.version}:"
    for flag in (*command.variables, *command.flags):
        yield from hanging(f"  {' '.join(flag.words)}: {flag.reason}")


def running_page(report: Report, rows: Sequence[Beside]) -> list[str]:
    """What the log says that runs, beside what was planned, and what is wrong with it."""
    lines = ["", "what is running:", *(f"  {line}".rstrip() for line in doctor_page(report))]
    if rows:
        words = {None: "", True: "as planned", False: "not as planned"}
        cells = [(row.kind, row.planned, row.running, words[row.same]) for row in rows]
        lines += ["", *table(("", "planned", "running", ""), cells, "lLLl", indent=2)]
    return lines


def absent(command: Command) -> list[str]:
    """Why the command is only printed."""
    name = NAMES[command.engine]
    return hanging(
        f"{name} is not installed here (no {command.program[0]} on PATH, none in this Python): this is the command "
        f"to run where it is. --python or --executable names one in another place."
    )
