"""What ``narrowcast serve`` takes."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import Verb, count
from narrowcast.arguments.plan import MODEL, question_arguments, tokens

_SERVE = """\
Prints the engine's command with a reason for each flag, runs it where the
engine is installed, passes its log on, and says what is really running beside
what was planned once it serves. Ctrl-C stops it. What stands behind -- goes to
the engine as it is. Exit code 0: it was stopped or only printed; 1: it failed.

examples:
  narrowcast serve MODEL
  narrowcast serve MODEL --gpu H100 --tp 2 --context 32k --batch 64 --dry-run
  narrowcast serve MODEL --preset fp8_dynamic --kv fp8
  narrowcast serve MODEL --engine sglang --port 30000 -- --log-level debug
  narrowcast serve MODEL --python ~/vllm/bin/python --quiet"""


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    question_arguments(parser)
    add("--gpu", default="here", metavar="NAME", help="L4, H100, MI300X, ... (this machine's)")
    add("--gpus-per-node", type=count, default=8, metavar="N", help="GPUs of a machine (8)")
    add("--context", type=tokens, default=8192, metavar="N", help="tokens of a sequence: 8192, 32k (8192)")
    add("--batch", type=count, default=1, metavar="N", help="sequences at once (the engine's)")
    add("--preset", metavar="NAME", help="quantize so, while loading where the engine can")
    add("--quantization", metavar="NAME", help="the engine's own name for quantizing while loading")
    add("--host", metavar="NAME", help="where it listens (the engine's)")
    add("--port", type=count, metavar="N", help="where it listens (the engine's)")
    add("--name", metavar="NAME", help="the model's name in requests (MODEL)")
    add("--python", metavar="FILE", help="an interpreter that has the engine")
    add("--executable", metavar="FILE", help="the engine's command, where it is not on PATH")
    add(
        "--engine-flag",
        dest="extra",
        action="append",
        default=[],
        metavar="WORD",
        help="a word for the engine, as those behind -- (repeatable)",
    )
    add("--dry-run", action="store_true", help="print the command only")
    add("-q", "--quiet", action="store_true", help="do not pass the engine's log on")


VERBS = (Verb("serve", "the engine's command for a plan, run and watched", _SERVE, _serve_arguments),)
