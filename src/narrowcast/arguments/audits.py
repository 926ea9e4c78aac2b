"""What the verbs take that look for what is wrong, and mend it: audit, rules, repair, doctor."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import MODEL, Verb, count

_AUDIT = """\
Rules are chosen and silenced by code, by the beginning of a code (NC1: all of
scales) or by name; a settings file keeps both, with a reason for each silence
(docs/audit.md). `narrowcast rules` lists them. Without --gpu the table of
engines holds for the best GPU of each. Exit code 1: an error that is not
silenced.

examples:
  narrowcast audit MODEL
  narrowcast audit MODEL --quick --for vllm --gpu H100 --tp 2
  narrowcast audit MODEL-NVFP4 --against MODEL --html audit.html
  narrowcast audit MODEL-FP8 --kv-sample keys.npz
  narrowcast audit MODEL --select NC1,NC3 --ignore 'NC402=the head is FP8'
  narrowcast audit MODEL --settings audit.toml --sarif audit.sarif --json"""

_RULES = """\
examples:
  narrowcast rules
  narrowcast rules NC110
  narrowcast rules nonfinite-scale --json"""

_REPAIR = """\
Repairs: config (config blocks and ignore lists from the tensors), fused_outer
(one outer scale for layers that engines fuse), kv_names (spellings of KV cache
scales), index, and unity_kv where it is asked for. Codes stay as they are where
the values allow it; what is rounded is counted. Exit code 1: an error is left.

examples:
  narrowcast repair MODEL OUT --dry-run
  narrowcast repair MODEL OUT
  narrowcast repair MODEL OUT --only config,kv_names
  narrowcast repair MODEL OUT --unity-kv"""

_DOCTOR = """\
LOG is a file, or - for standard input, which is read to its end: save the log
of a server that goes on (`vllm serve MODEL 2>&1 | tee vllm.log`). Exit code 1:
an error is in the log.

examples:
  narrowcast doctor vllm.log
  kubectl logs POD | narrowcast doctor -
  narrowcast doctor --symptom
  narrowcast doctor --symptom all exclamation marks"""


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--against", metavar="PARENT", help="the unquantized parent, to see what was lost and dropped")
    add("--for", dest="engine", metavar="ENGINE", help="vllm, sglang, tensorrt-llm or transformers")
    add("--gpu", metavar="NAME", help="the GPU it shall run on: H100, B200, MI300X, ...")
    add("--tp", type=count, default=1, metavar="N", help="the tensor-parallel size it shall run with (1)")
    add(
        "--kv-sample",
        metavar="FILE",
        help="keys and values of a run: .npy, .npz, .safetensors (k, layers.3.v)",
    )
    add("--quick", action="store_true", help="headers and scales only")
    for name, text in {
        "--select": "only these rules, comma-separated (repeatable)",
        "--ignore": "silence a rule: CODE or CODE=reason (repeatable)",
    }.items():
        add(name, action="append", default=[], metavar="CODES", help=text)
    add("--settings", metavar="FILE", help="a TOML file with select and [[silence]]")
    add("--sarif", metavar="FILE", help="write the findings as SARIF 2.1.0, for code hosts")
    add("--html", metavar="FILE", help="write one page with plots (needs narrowcast[page])")
    add("--workers", type=count, metavar="N", help="threads (one per core)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _rules_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RULE", help="a code or a name; all rules without it")


def _repair_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory or a hub id")
    add("out", metavar="OUT", help="the directory to make")
    add("--only", action="append", default=[], metavar="NAMES", help="only these repairs, comma-separated")
    add("--unity-kv", action="store_true", help="write KV cache scales of 1.0, as engines assume them")
    add("--container", metavar="NAME", help="the container, where the tensors fit several")
    add("--preset", metavar="NAME", help="the preset, where the tensors fit several")
    add("--dry-run", action="store_true", help="show what would be mended; write nothing")
    add("--resume", action="store_true", help="go on with a run that was killed")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("log", nargs="?", metavar="LOG", help="the start-up log of vLLM, SGLang or TensorRT-LLM")
    add(
        "--symptom",
        nargs="*",
        metavar="WORD",
        help="what it may come from that people see; all without a word",
    )


VERBS = (
    Verb("audit", "what is silently wrong in a checkpoint, found by reading it", _AUDIT, _audit_arguments),
    Verb("rules", "what audit looks for, and why", _RULES, _rules_arguments),
    Verb("repair", "mend what has one right answer, in a copy", _REPAIR, _repair_arguments),
    Verb("doctor", "what a start-up log says in plain words; causes of symptoms", _DOCTOR, _doctor_arguments),
)
