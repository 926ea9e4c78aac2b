"""What ``narrowcast bench`` takes."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import MODEL, Verb, count

_BENCH = """\
Measures the machine's memory bandwidth over what a step of the model reads,
then decode steps and prefills, and prints them beside the lower bounds. Tokens
are random; what is said does not change how long it takes. vLLM runs as a child
with the flags of `narrowcast serve`, and with what stands behind --.

examples:
  narrowcast bench MODEL-FP8 --against MODEL
  narrowcast bench MODEL --batch 1,8,32 --prompt 256
  narrowcast bench MODEL --engine vllm --python vllm/bin/python"""


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"no batches: {text!r}; wanted numbers such as 1,32") from None


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--against", metavar="PARENT", help="time this model in the same run, and compare")
    add("--batch", type=_batches, default=(1, 32), metavar="N,N", help="sequences at once (1,32)")
    add("--prompt", type=count, default=64, metavar="N", help="tokens of a prompt (64)")
    add("--tokens", type=count, default=32, metavar="N", help="decode steps that are timed (32)")
    add("--engine", default="ours", metavar="NAME", help="ours or vllm (ours)")
    add("--python", metavar="FILE", help="an interpreter that has vLLM")
    add(
        "--engine-flag", dest="extra", action="append", default=[], metavar="WORD",
        help="a word for vLLM, as those behind -- (repeatable)",
    )  # fmt: skip
    add("--threads", type=count, metavar="N", help="threads (all that there are)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


VERBS = (
    Verb("bench", "decode and prefill on this machine, beside what is possible", _BENCH, _bench_arguments),
)
