"""The grammar of the command line: verbs, flags, help with examples; one file per area, one row per verb."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence

from narrowcast._version import __version__
from narrowcast.arguments import (
    audits,
    bench,
    calibrate,
    checkpoints,
    engines,
    evaluate,
    gpus,
    numbers,
    plan,
    serve,
    trace,
    verdict,
)
from narrowcast.arguments.parser import Help, Parser, Verb
from narrowcast.errors import UsageError

Runs = Mapping[str, Callable[[argparse.Namespace], int]]
_ROWS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        *numbers.VERBS[:-1],
        *checkpoints.VERBS,
        *audits.VERBS,
        *calibrate.VERBS,
        *evaluate.VERBS,
        *trace.VERBS,
        *verdict.VERBS,
        *gpus.VERBS,
        *plan.VERBS,
        *engines.VERBS,
        *serve.VERBS,
        *bench.VERBS,
        numbers.VERBS[-1],
    )
}
VERBS = tuple(_ROWS)

DESCRIPTION = """\
Low-precision LLM checkpoints, exact to the bit: what formats do to numbers,
what schemes cost, what a checkpoint holds; to quantize one, to convert it into
another container, to compare it with another, to find what is silently wrong in
it and mend that, and to read what an engine says when it starts."""

EXAMPLES = """\
examples:
  narrowcast formats e4m3fn --value 0.3
  narrowcast presets
  narrowcast inspect SmolLM2-135M
  narrowcast quantize SmolLM2-135M out --preset fp8_dynamic
  narrowcast convert DeepSeek-FP8 out --to plain
  narrowcast compare DeepSeek-FP8 out
  narrowcast audit DeepSeek-FP8
  narrowcast plan DeepSeek-FP8 --gpu H200 --tp 8
  narrowcast doctor vllm.log

exit codes: 0 fine, 1 findings, 2 usage, 3 bad input, 4 undecided"""


def parsers(runs: Runs) -> dict[str, argparse.ArgumentParser]:
    """The whole grammar: the parser of ``narrowcast`` under that name, each verb's under its own."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    reports = Parser(add_help=False, parents=[shared])
    reports.add_argument("--json", action="store_true", help="answer in JSON, with stable keys")
    parser = Parser(
        "narrowcast", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=Help, parents=[shared]
    )
    parser.add_argument(
        "--version", action="version", version=f"narrowcast {__version__}", help="show the version"
    )
    verbs = parser.add_subparsers(
        title="verbs", dest="verb", metavar="VERB", required=True, parser_class=Parser
    )
    made: dict[str, argparse.ArgumentParser] = {"narrowcast": parser}
    for name, row in _ROWS.items():
        made[name] = verbs.add_parser(
            name,
            help=row.text,
            description=f"{row.text[0].upper()}{row.text[1:]}.",
            epilog=row.examples,
            formatter_class=Help,
            parents=[reports],
        )
        row.add(made[name])
        made[name].set_defaults(run=runs[name])
    return made


def check_verb(arguments: Sequence[str]) -> None:
    """Name the verb that was probably meant, which argparse cannot."""
    typed = next((word for word in arguments if not word.startswith("-")), None)
    if typed is None or typed in VERBS:
        return
    near = difflib.get_close_matches(typed, VERBS, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        "unknown verb", got=typed, wanted=", ".join(VERBS), remedy=f"{hint}`narrowcast --help` lists them"
    )


def joined(arguments: Sequence[str]) -> list[str]:
    """``--value -2^-10`` as ``--value=-2^-10``: argparse takes a word with a minus sign for an option. What stands
    behind ``--`` of serve and bench becomes values of ``--engine-flag`` for the same reason."""
    words: list[str] = []
    if "--" in arguments and {"serve", "bench"} & {*arguments[: arguments.index("--")]}:
        at = arguments.index("--")
        arguments = [*arguments[:at], *(f"--engine-flag={word}" for word in arguments[at + 1 :])]
    for word in arguments:
        if words and words[-1] == "--value" and word != "--":
            words[-1] = f"--value={word}"
        else:
            words.append(word)
    return words
