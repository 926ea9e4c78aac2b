"""The shape of the grammar: argparse as this command uses it, and a verb as a row.

Help is laid out for 80 columns on every terminal. An argument that argparse refuses is a UsageError like any
other; flags are never abbreviated, so that a script cannot depend on an abbreviation that a later flag takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NoReturn

from narrowcast.errors import UsageError

WIDTH = 80
MODEL = "a directory, a .safetensors or .gguf file, or a hub id"


@dataclass(frozen=True)
class Verb:
    """A verb: what it is for in one line, what its help ends with, and what it takes."""

    name: str
    text: str
    examples: str
    add: Callable[[argparse.ArgumentParser], None]


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as written, the same on every terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24, width=WIDTH - 2)
        self._action_max_length = 16  # argparse forgets the indent of verbs and would break the longest


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, the way to the help, exit code 2."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"`{self.prog} --help` shows what it takes")


def count(text: str) -> int:
    """A number that counts things; argparse names the flag in the error."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a count: {text!r}")
    return int(text)


def decibels(text: str) -> float:
    """A finite number of dB."""
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not isfinite(value):
        raise argparse.ArgumentTypeError(f"not a number of dB: {text!r}")
    return value


def plot_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """``--plot FILE``, which draws ``what``."""
    parser.add_argument("--plot", metavar="FILE", help=f"draw {what}: .svg or .png (needs narrowcast[page])")
