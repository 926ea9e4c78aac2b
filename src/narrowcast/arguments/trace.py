"""What the verbs that look inside a running model take: trace, legal."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import MODEL, Verb, count, plot_argument

_TRACE = """\
Runs a text through the model, layer by layer, and counts what every operation
gives: the largest value and where it is, headroom in FP16 and E4M3, shares
lost. Says what FP16 could not hold first, and why. With --dtype float16 it runs
so, and shows how infinity and NaN were made. Exit code 1: it made one.

examples:
  narrowcast trace SmolLM2-135M
  narrowcast trace MODEL --text book.txt --tokens 4096
  narrowcast trace MODEL --text prompts.jsonl --dtype float16
  narrowcast trace MODEL --json > trace.json"""

_LEGAL = """\
Runs a short text once in float32, and once more for each operation in each
narrower dtype, that operation alone. KL divergence and top-1 agreement are
those of the logits; two yardsticks, the whole model in bfloat16 and its linear
layers in FP8, are measured beside them.

examples:
  narrowcast legal SmolLM2-135M
  narrowcast legal MODEL --text book.txt --tokens 512
  narrowcast legal MODEL --only softmax --only 'KV cache'"""


def _text_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help="text, .jsonl, .json or .parquet (built-in topics)",
    )
    add("--tokens", type=count, default=tokens, metavar="N", help=f"how many tokens ({tokens})")
    add("--context", type=count, default=512, metavar="N", help="tokens of a piece of text (512)")
    add("--quiet", action="store_true", help="no progress on stderr")


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    _text_arguments(parser, 512)
    add = parser.add_argument
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="what it runs in (float32)",
    )
    add("--stream", action="store_true", help="hidden states on disk (only where they are many)")
    add("--online", metavar="NAME", help="quantize linear layers as this scheme of vLLM's, or preset, does")


def _legal_arguments(parser: argparse.ArgumentParser) -> None:
    _text_arguments(parser, 256)
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="OPERATION", help="only these operations (repeatable)")
    plot_argument(parser, "a block with the dtypes beside each operation")


VERBS = (
    Verb(
        "trace",
        "what every operation of a running model holds, and what FP16 could not",
        _TRACE,
        _trace_arguments,
    ),
    Verb("legal", "which operation may run in which narrower dtype, measured", _LEGAL, _legal_arguments),
)
