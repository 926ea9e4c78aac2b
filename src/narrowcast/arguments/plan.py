"""What ``narrowcast plan`` takes."""

from __future__ import annotations

import argparse
import re

from narrowcast.arguments.evaluate import share
from narrowcast.arguments.gpus import gpus_argument
from narrowcast.arguments.parser import Verb, count, plot_argument

MODEL = "a directory, a config.json, a .safetensors or .gguf file, or a hub id"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_TOKENS = re.compile(r"(\d+)([km]?)")

_PLAN = """\
From the config and the headers alone; no weight is read and nothing is run.
Times are lower bounds: what moving the bytes and making the products takes at
least. Without --preset an unquantized model is planned as it is, and presets
are ranked for it; several --preset are compared with each other.

examples:
  narrowcast plan MODEL --gpu L4
  narrowcast plan config.json --gpu H100 --preset fp8_dynamic --batch 64
  narrowcast plan MODEL-FP8 --gpu A100 --gpu L40S --gpu H100
  narrowcast plan MODEL --gpu H200 --tp 8 --ep --context 128k --kv fp8
  narrowcast plan MODEL --gpu L4 --evaluations fp8.json --evaluations w4a16.json"""


def tokens(text: str) -> int:
    """A number of tokens: 8192, 32k (32768), 1m."""
    found = _TOKENS.fullmatch(text.lower())
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"not a number of tokens: {text!r}, as 8192 or 32k")
    return int(found[1]) * _UNITS[found[2]]


def question_arguments(parser: argparse.ArgumentParser) -> None:
    """What a plan and the command that follows from it are asked in the same words."""
    add = parser.add_argument
    add("--engine", default="vllm", metavar="NAME", help="vllm, sglang or tensorrt-llm (vllm)")
    add("--tp", type=count, default=1, metavar="N", help="GPUs that share each layer (1)")
    add("--pp", type=count, default=1, metavar="N", help="groups of GPUs that share the layers (1)")
    add("--ep", action="store_true", help="spread routed experts over the --tp GPUs one by one")
    add("--container", metavar="NAME", help="the container that --preset would be written to")
    add("--kv", default="auto", metavar="MODE", help="the KV cache: fp8, nvfp4, ... (the checkpoint's)")
    add("--utilisation", type=share, default=0.9, metavar="X", help="the share of memory to take (0.9)")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in {
        "--gpu": "L4, H100, MI300X, ...; here: this machine's (repeatable: compare)",
        "--preset": "as if quantized so (repeatable: compare)",
        "--evaluations": "quality: evaluate --json, or PRESET=FILE (repeatable)",
    }.items():
        metavar = "FILE" if name == "--evaluations" else "NAME"
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    gpus_argument(parser)
    question_arguments(parser)
    add("--context", type=tokens, metavar="N", help="tokens of a sequence: 8192, 32k (8k)")
    add("--batch", type=count, default=1, metavar="N", help="sequences at once (1)")
    plot_argument(parser, "the roofline and the memory")


VERBS = (Verb("plan", "what will run, how fast at most, what fits, how to serve it", _PLAN, _plan_arguments),)
