"""What ``narrowcast engines`` takes."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import Verb

_ENGINES = """\
Names are those of --quantization, --kv-cache-dtype, --dtype and the flags that
choose kernels, and TensorRT-LLM's algorithms. The same word may mean another
thing in another engine.

examples:
  narrowcast engines                     all, with versions and counts
  narrowcast engines vllm                its names and kernels
  narrowcast engines vllm sglang         the same thing in both engines' words
  narrowcast engines fp8                 what a name means in each engine
  narrowcast engines sglang mxfp4        in one of them"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="an engine, two of them, or names that their flags take"
    )


VERBS = (Verb("engines", "what engines call things, and what the names mean", _ENGINES, _arguments),)
