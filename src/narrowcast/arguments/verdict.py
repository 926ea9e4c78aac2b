"""What the verb takes that judges one model against another: verdict."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import Verb, count

_VERDICT = """\
A is the parent, B the quantized model: lm-eval's samples of --log_samples (a
file, or the directory of several tasks), pass@k records, or JSON lines with id
and score. Verdicts: better, worse, no difference shown, undecided, invalid
(docs/verdict.md). Exit code 0: better or no difference shown; 1: worse; 4:
undecided or invalid.

A canary is judged by two counters, EVENTS/N of what runs now and then of the
canary, at any moment and as often as one likes.

examples:
  narrowcast verdict parent.jsonl quantized.jsonl
  narrowcast verdict out/parent out/quantized --effect 0.01
  narrowcast verdict A B --metric acc_norm --cluster subject --json
  narrowcast verdict he_parent.jsonl he_quantized.jsonl --k 10
  narrowcast verdict --failures 412/98231 655/99120
  narrowcast verdict --successes 9531/10000 4790/5000 --effect 0.01"""


def share(text: str) -> float:
    """A number above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"not a share between 0 and 1: {text!r}")
    return value


def counter(text: str) -> tuple[int, int]:
    """EVENTS/N as two counts."""
    events, slash, n = text.partition("/")
    if not (slash and events.isdecimal() and n.isdecimal()) or not int(events) <= int(n) or not int(n):
        raise argparse.ArgumentTypeError(f"not EVENTS/N, such as 412/98231: {text!r}")
    return int(events), int(n)


def _verdict_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", nargs="?", metavar="A", help="answers of the parent: a file, a directory, or files with commas")
    add("b", nargs="?", metavar="B", help="answers of the quantized model to the same questions")
    add(
        "--effect",
        type=share,
        metavar="SHARE",
        help="the smallest change that matters: 0.02 is 2 points (0.02; none for counters)",
    )
    add(
        "--confidence",
        type=share,
        default=0.95,
        metavar="SHARE",
        help="of intervals; p against the rest (0.95)",
    )
    add("--metric", metavar="NAME", help="the metric to judge by (the first from 0 to 1)")
    add("--filter", metavar="NAME", help="the filter of lm-eval, where several were applied (the first)")
    add("--cluster", metavar="FIELD", help="what questions share that belong together; or task")
    add("--k", type=count, default=1, metavar="K", help="of pass@k (1)")
    for name, text in {
        "--failures": "two counters of what should not happen",
        "--successes": "two counters of what should",
    }.items():
        add(name, nargs=2, type=counter, metavar="EVENTS/N", help=text)


VERBS = (
    Verb(
        "verdict", "whether a model is worse than its parent, by their answers", _VERDICT, _verdict_arguments
    ),
)
