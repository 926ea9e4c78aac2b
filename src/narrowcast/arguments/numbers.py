"""What the verbs about numbers take: formats, schemes, presets, roundtrip, vectors."""

from __future__ import annotations

import argparse
from functools import partial

from narrowcast.arguments.parser import Verb, count, plot_argument

_FORMATS = """\
examples:
  narrowcast formats                        all of them
  narrowcast formats e4m3fn                 layout, limits, values
  narrowcast formats e4m3fn --value 0.3     code, neighbours, error, every rule
  narrowcast formats --value 2^-10          one value in every format
  narrowcast formats --bits 00111000        one byte in every 8-bit format
  narrowcast formats e3m3:bias=3,finite     a format of your own
  narrowcast formats --plot ranges.svg      how far each reaches
  narrowcast formats e4m3fn --plot e4m3.svg its values beside INT8's
  narrowcast formats --row "0.02 -0.5 1.3 7.9 -0.004 3.1 400" \\
      --scheme fp8_tensor,int8_tensor --span 127"""

_SCHEMES = """\
examples:
  narrowcast schemes
  narrowcast schemes nvfp4 --shape 4096x14336
  narrowcast schemes --plot layouts.svg              MXFP4 beside NVFP4
  narrowcast schemes fp8_block128 --shape 128x2880x2880      128 experts"""

_PRESETS = """\
examples:
  narrowcast presets
  narrowcast presets w4a16 --shape 4096x14336"""

_ROUNDTRIP = """\
examples:
  narrowcast roundtrip randn:512x4096
  narrowcast roundtrip laplace:512x4096 --schemes mxfp4 --rule floor,rceil,even
  narrowcast roundtrip randn:512x4096 --schemes int4_g128 --span 7,7.5,8
  narrowcast roundtrip weights.npy --formats e4m3fn,e5m2 --schemes fp8_channel
  narrowcast roundtrip SmolLM2-135M:model.layers.0.mlp.up_proj.weight"""

_VECTORS = """\
SCHEME is a scheme, which leaves inputs wide unless --input names theirs, or a
preset. One .npz and one C header hold the same arrays.

examples:
  narrowcast vectors nvfp4 --shape 128x256x512 --out vectors
  narrowcast vectors fp8_block --shape 16x256x512
  narrowcast vectors int4_g128 --shape 4x64x256 --input int8_token --seed 7"""


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
    plot_argument(parser, "all ranges, or the values of FORMAT beside INT8's")


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


def _schemes_arguments(parser: argparse.ArgumentParser) -> None:
    _named_arguments(parser, "scheme")
    plot_argument(parser, "what shares a scale in SCHEME, or in MXFP4 and NVFP4")


def _roundtrip_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="randn:N, laplace:N or student5:N (N may be RxC), FILE.npy, or CHECKPOINT:TENSOR",
    )
    parser.add_argument("--formats", metavar="NAMES", help="formats to try without a scale")
    parser.add_argument("--schemes", metavar="NAMES", help="schemes to try")
    _variation_arguments(parser)
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="seed of the drawn samples (0)")


def _vectors_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="SCHEME", help="a scheme of the weight, or a preset")
    add("--shape", required=True, metavar="MxNxK", help="x is MxK, w is NxK, y = x times w transposed")
    add("--input", metavar="SCHEME", help="how x is quantized, where a scheme is named")
    add("--out", default=".", metavar="DIR", help="where the two files go (the current directory)")
    add("--seed", type=count, default=0, metavar="N", help="seed of the drawn samples (0)")


VERBS = (
    Verb("formats", "number formats, and what they do to numbers", _FORMATS, _formats_arguments),
    Verb(
        "schemes",
        "what shares a scale, and what that costs",
        _SCHEMES,
        _schemes_arguments,
    ),
    Verb(
        "presets",
        "the names that quantize takes, and what they do",
        _PRESETS,
        partial(_named_arguments, what="preset"),
    ),
    Verb(
        "roundtrip",
        "what formats, schemes and rules lose on the same numbers",
        _ROUNDTRIP,
        _roundtrip_arguments,
    ),
    Verb(
        "vectors", "operands, scales, layouts and products to test kernels with", _VECTORS, _vectors_arguments
    ),
)
