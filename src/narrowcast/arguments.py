"""The grammar of the command line: verbs, flags, help with examples.

Help is laid out for 80 columns on every terminal. An argument that argparse refuses is a UsageError like any
other; flags are never abbreviated, so that a script cannot depend on an abbreviation that a later flag takes.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NoReturn

from narrowcast._version import __version__
from narrowcast.errors import UsageError

VERBS = ("formats", "schemes", "presets", "roundtrip", "inspect", "quantize", "convert", "compare", "vectors")
Runs = Mapping[str, Callable[[argparse.Namespace], int]]
WIDTH = 80

DESCRIPTION = """\
Low-precision LLM checkpoints, exact to the bit: what formats do to numbers,
what schemes cost, what a checkpoint holds; to quantize one, to convert it into
another container, and to compare it with another."""

MODEL = "a directory, a .safetensors or .gguf file, or a hub id"

EXAMPLES = {
    "narrowcast": """\
examples:
  narrowcast formats e4m3fn --value 0.3
  narrowcast presets
  narrowcast inspect SmolLM2-135M
  narrowcast quantize SmolLM2-135M out --preset fp8_dynamic
  narrowcast convert DeepSeek-FP8 out --to plain
  narrowcast compare DeepSeek-FP8 out

exit codes: 0 fine, 1 findings, 2 usage, 3 bad input, 4 undecided""",
    "formats": """\
examples:
  narrowcast formats                        all of them
  narrowcast formats e4m3fn                 layout, limits, values
  narrowcast formats e4m3fn --value 0.3     code, neighbours, error, every rule
  narrowcast formats --value 2^-10          one value in every format
  narrowcast formats --bits 00111000        one byte in every 8-bit format
  narrowcast formats e3m3:bias=3,finite     a format of your own
  narrowcast formats --row "0.02 -0.5 1.3 7.9 -0.004 3.1 400" \\
      --scheme fp8_tensor,int8_tensor --span 127""",
    "schemes": """\
examples:
  narrowcast schemes
  narrowcast schemes nvfp4 --shape 4096x14336
  narrowcast schemes fp8_block128 --shape 128x2880x2880      128 experts""",
    "presets": """\
examples:
  narrowcast presets
  narrowcast presets w4a16 --shape 4096x14336""",
    "roundtrip": """\
examples:
  narrowcast roundtrip randn:512x4096
  narrowcast roundtrip laplace:512x4096 --schemes mxfp4 --rule floor,rceil,even
  narrowcast roundtrip randn:512x4096 --schemes int4_g128 --span 7,7.5,8
  narrowcast roundtrip weights.npy --formats e4m3fn,e5m2 --schemes fp8_channel
  narrowcast roundtrip SmolLM2-135M:model.layers.0.mlp.up_proj.weight""",
    "inspect": """\
examples:
  narrowcast inspect SmolLM2-135M
  narrowcast inspect model-00001-of-00002.safetensors
  narrowcast inspect model.gguf --json""",
    "quantize": """\
Patterns are exact module names, re: with a regular expression, or Linear.
Containers are compressed-tensors, modelopt, quark, gptq, awq, auto-round, fp8
and mxfp4; `narrowcast convert` also writes GGUF and ONNX files.

examples:
  narrowcast quantize SmolLM2-135M out --preset fp8_dynamic
  narrowcast quantize MODEL OUT --preset nvfp4a16 --dry-run
  narrowcast quantize MODEL OUT --preset w4a16 --ignore 're:.*down_proj'
  narrowcast quantize MODEL OUT --preset nvfp4a16 --container modelopt
  narrowcast quantize MODEL OUT --recipe recipe.toml --resume""",
    "convert": """\
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
  narrowcast convert model.gguf out --to plain""",
    "compare": """\
Both are a directory, a .safetensors or .gguf file, or a hub id, in whatever
containers. Exit code 0: equal, or within --min-sqnr; 1: not.

examples:
  narrowcast compare MODEL MODEL-NVFP4 --min-sqnr 18
  narrowcast compare DeepSeek-FP8 out
  narrowcast compare A B --only 're:.*\\.mlp\\.' --json""",
    "vectors": """\
SCHEME is a scheme, which leaves inputs wide unless --input names theirs, or a
preset. One .npz and one C header hold the same arrays.

examples:
  narrowcast vectors nvfp4 --shape 128x256x512 --out vectors
  narrowcast vectors fp8_block --shape 16x256x512
  narrowcast vectors int4_g128 --shape 4x64x256 --input int8_token --seed 7""",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as written, the same on every terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24, width=WIDTH - 2)
        self._action_max_length = 13  # argparse forgets the indent of verbs and would break the longest


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, the way to the help, exit code 2."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"`{self.prog} --help` shows what it takes")


def parsers(runs: Runs) -> dict[str, argparse.ArgumentParser]:
    """The whole grammar: the parser of ``narrowcast`` under that name, each verb's under its own."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    reports = Parser(add_help=False, parents=[shared])
    reports.add_argument("--json", action="store_true", help="answer in JSON, with stable keys")
    parser = Parser(
        "narrowcast",
        description=DESCRIPTION,
        epilog=EXAMPLES["narrowcast"],
        formatter_class=_Help,
        parents=[shared],
    )
    parser.add_argument(
        "--version", action="version", version=f"narrowcast {__version__}", help="show the version"
    )
    verbs = parser.add_subparsers(
        title="verbs", dest="verb", metavar="VERB", required=True, parser_class=Parser
    )

    made: dict[str, argparse.ArgumentParser] = {"narrowcast": parser}

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made[name] = verbs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=EXAMPLES[name],
            formatter_class=_Help,
            parents=[reports],
        )
        made[name].set_defaults(run=runs[name])
        return made[name]

    _formats_arguments(verb("formats", "number formats, and what they do to numbers"))
    _named_arguments(verb("schemes", "what shares a scale, and what that costs"), "scheme")
    _named_arguments(verb("presets", "the names that quantize takes, and what they do"), "preset")
    _roundtrip_arguments(verb("roundtrip", "what formats, schemes and rules lose on the same numbers"))
    verb("inspect", "what a checkpoint holds, quantized or not").add_argument(
        "model", metavar="MODEL", help=MODEL
    )
    _quantize_arguments(verb("quantize", "quantize a checkpoint, and check every element of the result"))
    _convert_arguments(
        verb("convert", "move a checkpoint into another container, losing nothing it need not")
    )
    _compare_arguments(verb("compare", "two checkpoints, tensor by tensor, as the numbers they decode to"))
    _vectors_arguments(verb("vectors", "operands, scales, layouts and products to test kernels with"))
    return made


def _formats_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="FORMAT", help="a name, an alias, or a spelling such as e3m3:bias=3,finite"
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--value", metavar="X", help="what happens to this number: 0.3, 2^-10, 1/3, inf, nan")
    asked.add_argument("--bits", metavar="BITS", help="what these bits mean: 00111000 or 0x38")
    asked.add_argument("--row", metavar="NUMBERS", help="a row of numbers, scaled by each --scheme")
    parser.add_argument("--scheme", metavar="NAMES", help="schemes for --row, comma-separated")
    _variation_arguments(parser)


def _variation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rule", metavar="RULES", help="scale rules to try where they apply: floor, rceil, amax, ..."
    )
    parser.add_argument(
        "--span", metavar="SPANS", help="what integers map amax onto: 127, 127.5 or 128 for int8"
    )


def _named_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("name", nargs="?", metavar=what.upper(), help=f"one {what}; all of them without it")
    parser.add_argument("--shape", metavar="NxK", help="the weight to count for (4096x4096)")


def _roundtrip_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="randn:N, laplace:N or student5:N (N may be RxC), FILE.npy, or CHECKPOINT:TENSOR",
    )
    parser.add_argument("--formats", metavar="NAMES", help="formats to try without a scale")
    parser.add_argument("--schemes", metavar="NAMES", help="schemes to try")
    _variation_arguments(parser)
    parser.add_argument("--seed", type=_count, default=0, metavar="N", help="seed of the drawn samples (0)")


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
    add("--workers", type=_count, metavar="N", help="threads (one per core)")
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
    add("--min-sqnr", type=_decibels, metavar="DB", help="how near every tensor must be, instead of equal")
    add("--workers", type=_count, metavar="N", help="threads (one per core)")
    add("--quiet", action="store_true", help="no progress on stderr")


def _vectors_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="SCHEME", help="a scheme of the weight, or a preset")
    add("--shape", required=True, metavar="MxNxK", help="x is MxK, w is NxK, y = x times w transposed")
    add("--input", metavar="SCHEME", help="how x is quantized, where a scheme is named")
    add("--out", default=".", metavar="DIR", help="where the two files go (the current directory)")
    add("--seed", type=_count, default=0, metavar="N", help="seed of the drawn samples (0)")


def _count(text: str) -> int:
    """A number that counts things; argparse names the flag in the error."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a count: {text!r}")
    return int(text)


def _decibels(text: str) -> float:
    """A finite number of dB."""
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not isfinite(value):
        raise argparse.ArgumentTypeError(f"not a number of dB: {text!r}")
    return value


def check_verb(arguments: Sequence[str]) -> None:
    """Name the verb that was probably meant, which argparse cannot."""
    typed = next((word for word in arguments if not word.startswith("-")), None)
    if typed is None or typed in VERBS:
        return
    near = difflib.get_close_matches(typed, VERBS, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        "unknown verb", got=typed, wanted=", ".join(VERBS), remedy=f"{hint}`narrowcast --help` lists them"
    )


def joined(arguments: Sequence[str]) -> list[str]:
    """``--value -2^-10`` as ``--value=-2^-10``: argparse takes a word with a minus sign for an option."""
    words: list[str] = []
    for word in arguments:
        if words and words[-1] == "--value" and word != "--":
            words[-1] = f"--value={word}"
        else:
            words.append(word)
    return words
