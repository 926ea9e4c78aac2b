"""What ``narrowcast evaluate`` takes."""

from __future__ import annotations

import argparse
from math import isfinite

from narrowcast.arguments.parser import MODEL, Verb, count

_EVALUATE = """\
Both models read one text once, each with its own arithmetic; intervals are over
documents. Without --text it is the help topics that come with Python, without
--against there is no parent, and only a perplexity. KL is in nats per token.

Exit code 1: worse than --max-kl or --min-top1 asks for, or a gap that the
format cannot explain, which is a probable bug. 4: undecided (the interval holds
the limit), or a comparison that would mean nothing (other token ids, NaN).

examples:
  narrowcast evaluate MODEL-FP8 --against MODEL
  narrowcast evaluate MODEL-FP8 --against MODEL --max-kl 0.01 --text wiki.txt
  narrowcast evaluate MODEL --online fp8_per_tensor
  narrowcast evaluate MODEL --against MODEL --kv fp8_e4m3,int4_per_token_head
  narrowcast evaluate MODEL-W4A16 --against MODEL --retrieval --schema out.json"""


def limit(text: str) -> float:
    """A finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"not a number of zero or more: {text!r}")
    return value


def share(text: str) -> float:
    """A share, as 0.98 or 98%."""
    value = limit(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if value > 1:
        raise argparse.ArgumentTypeError(f"not a share: {text!r}, as 0.98 or 98%")
    return value


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="QUANTIZED", help=MODEL)
    add("--against", metavar="PARENT", help="the model it was made from")
    add("--online", metavar="NAME", help="quantize as an engine does while it loads: fp8_per_tensor, ...")
    add("--text", action="append", default=[], metavar="FILE", help="text, .jsonl or .parquet (repeatable)")
    add("--tokens", type=count, metavar="N", help="tokens to read (2048; all of --text)")
    add("--context", type=count, metavar="N", help="tokens that a piece has at most (128)")
    add("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (as the checkpoint says)")
    add("--kv", metavar="MODES", help="KV caches to run as well: fp8_e4m3,nvfp4,... (docs/kv_cache.md)")
    add("--kv-scales", metavar="STATS", help="for FP8 caches: statistics of calibrate, or an overlay")
    add("--attention", metavar="NAME", help="fp8 or fp8_p448: attention over the codes of FP8 caches")
    add("--accumulate", metavar="NAME", help="sample sums as tensor cores form them: hopper, ...")
    add("--greedy", type=count, metavar="N", help="prompts to continue greedily (8; 0 for none)")
    add("--retrieval", action="store_true", help="find a fact in filler, by depth and length")
    add("--schema", metavar="FILE", help="a JSON schema that outputs shall fit")
    add("--max-kl", type=limit, metavar="X", help="the mean KL divergence that is allowed")
    add("--min-top1", type=share, metavar="X", help="the share of same best tokens that is wanted: 98%%")
    add("--html", metavar="FILE", help="write one page with plots (needs narrowcast[page])")
    add("--stream", action="store_true", help="for models larger than memory: nothing is generated")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


VERBS = (
    Verb(
        "evaluate", "how far a quantized model is from its parent, on a text", _EVALUATE, _evaluate_arguments
    ),
)
