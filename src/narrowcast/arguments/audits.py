"""What the verbs take that look for what is wrong: audit, rules."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import MODEL, Verb, count

_AUDIT = """\
Rules are chosen and silenced by code, by the beginning of a code (NC1: all of
scales) or by name; a settings file keeps both, with a reason for each silence.
Exit code 1: an error that is not silenced.

examples:
  narrowcast audit MODEL
  narrowcast audit MODEL --quick --for vllm --gpu H100 --tp 2
  narrowcast audit MODEL-NVFP4 --against MODEL --html audit.html
  narrowcast audit MODEL --select NC1,NC3 --ignore 'NC402=the head is FP8'
  narrowcast audit MODEL --settings audit.toml --sarif audit.sarif --json"""

_RULES = """\
examples:
  narrowcast rules
  narrowcast rules NC110
  narrowcast rules nonfinite-scale --json"""


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--against", metavar="PARENT", help="the unquantized parent, to see what was lost and dropped")
    add("--for", dest="engine", metavar="ENGINE", help="vllm, sglang, tensorrt-llm or transformers")
    add("--gpu", metavar="NAME", help="the GPU it shall run on: H100, B200, MI300X, ...")
    add("--tp", type=count, default=1, metavar="N", help="the tensor-parallel size it shall run with (1)")
    add("--quick", action="store_true", help="headers and scales only")
    for name, text in {
        "--select": "only these rules, comma-separated (repeatable)",
        "--ignore": "silence a rule: CODE or CODE=reason (repeatable)",
    }.items():
        add(name, action="append", default=[], metavar="CODES", help=text)
    add("--settings", metavar="FILE", help="a TOML file with select and [[silence]]")
    add("--sarif", metavar="FILE", help="write the findings as SARIF 2.1.0, for code hosts")
    add("--html", metavar="FILE", help="write one page with plots, for people")
    add("--workers", type=count, metavar="N", help="threads (one per core)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _rules_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RULE", help="a code or a name; all rules without it")


VERBS = (
    Verb("audit", "what is silently wrong in a checkpoint, found by reading it", _AUDIT, _audit_arguments),
    Verb("rules", "what audit looks for, and why", _RULES, _rules_arguments),
)
