"""What the verbs about checkpoints take: inspect, quantize, convert, compare."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import MODEL, Verb, count, decibels

_INSPECT = """\
examples:
  narrowcast inspect SmolLM2-135M
  narrowcast inspect model-00001-of-00002.safetensors
  narrowcast inspect model.gguf --json"""

_QUANTIZE = """\
Patterns are exact module names, re: with a regular expression, or Linear.
Containers are compressed-tensors, modelopt, quark, gptq, awq, auto-round, fp8
and mxfp4; `narrowcast convert` also writes GGUF and ONNX files.

examples:
  narrowcast quantize SmolLM2-135M out --preset fp8_dynamic
  narrowcast quantize MODEL OUT --preset nvfp4a16 --dry-run
  narrowcast quantize MODEL OUT --preset w4a16 --ignore 're:.*down_proj'
  narrowcast quantize MODEL OUT --preset nvfp4a16 --container modelopt
  narrowcast quantize MODEL OUT --preset nvfp4+kv8 --stats stats.safetensors
  narrowcast quantize MODEL OUT --recipe recipe.toml --resume"""

_CONVERT = """\
Codes and scales move bit for bit where the target has a spelling for them.
--preset changes the scheme as well: without rounding where values allow it,
with a second rounding where --requantize asks for one.

Containers are plain, compressed-tensors, modelopt, quark, gptq, awq,
auto-round, fp8 and mxfp4. gguf and onnx make one file, without --dry-run and
--resume: gguf of a whole model, onnx of the quantized matrices.

examples:
  narrowcast convert DeepSeek-FP8 out --to plain
  narrowcast convert MODEL out --to modelopt --dry-run
  narrowcast convert gpt-oss out --to compressed-tensors --preset nvfp4a16
  narrowcast convert DeepSeek-FP8 out --to modelopt --preset nvfp4a16 \\
      --requantize --parent DeepSeek-BF16
  narrowcast convert MODEL out --to plain --dtype fp16
  narrowcast convert MODEL weights.onnx --to onnx --targets 're:.*up_proj'
  narrowcast convert MODEL model.gguf --to gguf --type q8_0
  narrowcast convert model.gguf out --to plain"""

_COMPARE = """\
Both are a directory, a .safetensors or .gguf file, or a hub id, in whatever
containers. Exit code 0: equal, or within --min-sqnr; 1: not.

examples:
  narrowcast compare MODEL MODEL-NVFP4 --min-sqnr 18
  narrowcast compare DeepSeek-FP8 out
  narrowcast compare A B --only 're:.*\\.mlp\\.' --json"""


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)


def _quantize_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _job_arguments(parser, "a directory, a .safetensors model or a hub id", "the directory to make")
    add("--preset", metavar="NAME", help="what to do; `narrowcast presets` lists them")
    add("--recipe", metavar="FILE", help="ordered patterns to presets or schemes, instead of --preset")
    _pattern_arguments(parser)
    add("--rule", metavar="NAME", help="another scale rule than the preset's")
    add(
        "--container",
        default="compressed-tensors",
        metavar="NAME",
        help="how the result is spelled (compressed-tensors)",
    )
    add(
        "--nonfinite",
        choices=("refuse", "copy"),
        default="refuse",
        help="what to do with a tensor that holds NaN or infinity (refuse)",
    )
    add("--strict", action="store_true", help="refuse where a smaller group would stand in")
    add("--stats", metavar="FILE", help="from narrowcast calibrate, for static inputs and KV caches")
    add("--stat", metavar="STAT", help="what scales are made from: amax, ema, delayed, p99.9 (amax)")


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _job_arguments(parser, MODEL, "the directory to make; with --to gguf or onnx the file")
    add("--to", required=True, metavar="CONTAINER", help="how the result is spelled; plain decodes")
    add("--preset", metavar="NAME", help="what the result is quantized to; its own scheme without it")
    _pattern_arguments(parser)
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="what --to plain writes (the source's own floats)")
    add("--type", metavar="TYPE", help="what --to gguf writes: q8_0, q4_0, mxfp4, ... (as they are)")
    add("--saturate", action="store_true", help="clip what fp16 cannot hold, and count it")
    add("--requantize", action="store_true", help="round a second time where the schemes demand it")
    add("--parent", metavar="MODEL", help="the unquantized parent, to see what going from it would lose")


def _job_arguments(parser: argparse.ArgumentParser, model: str, out: str) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=model)
    add("out", metavar="OUT", help=out)
    add("--workers", type=count, metavar="N", help="threads (one per core)")
    add("--dry-run", action="store_true", help="show the plan and its forecast; write nothing")
    add("--resume", action="store_true", help="go on with a run that was killed")
    add("--quiet", action="store_true", help="no progress on stderr")


def _pattern_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in {
        "--ignore": "keep these layers as they are (repeatable)",
        "--targets": "quantize only these layers (repeatable)",
    }.items():
        parser.add_argument(name, action="append", default=[], metavar="PATTERN", help=text)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="the reference")
    add("b", metavar="B", help="what is compared with it")
    add("--only", action="append", default=[], metavar="PATTERN", help="only these tensors (repeatable)")
    add("--min-sqnr", type=decibels, metavar="DB", help="how near every tensor must be, instead of equal")
    add("--workers", type=count, metavar="N", help="threads (one per core)")
    add("--quiet", action="store_true", help="no progress on stderr")


VERBS = (
    Verb("inspect", "what a checkpoint holds, quantized or not", _INSPECT, _inspect_arguments),
    Verb(
        "quantize",
        "quantize a checkpoint, and check every element of the result",
        _QUANTIZE,
        _quantize_arguments,
    ),
    Verb(
        "convert",
        "move a checkpoint into another container, losing nothing it need not",
        _CONVERT,
        _convert_arguments,
    ),
    Verb(
        "compare",
        "two checkpoints, tensor by tensor, as the numbers they decode to",
        _COMPARE,
        _compare_arguments,
    ),
)
