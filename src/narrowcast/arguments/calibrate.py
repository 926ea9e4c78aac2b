"""What calibrate and calibrate-kv take."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import MODEL, Verb, count

STAT = "what scales are made from: amax, ema, delayed, p99.9 (amax)"

_CALIBRATE = """\
The file holds, for every linear, what its inputs were: amax, a histogram,
maxima by channel and by piece of text; for every attention the same of keys,
values and queries after rotary embedding, by head; and the tokens that each
expert saw. Without --text it is the help topics that come with Python. A run
that was killed leaves OUT.partial, from which --resume goes on.

examples:
  narrowcast calibrate MODEL --text wiki.txt -o stats.safetensors
  narrowcast calibrate MODEL -o stats.safetensors --tokens 65536 --resume
  narrowcast calibrate --merge a.safetensors b.safetensors -o ab.safetensors
  narrowcast quantize MODEL OUT --preset fp8+kv8 --stats stats.safetensors"""

_CALIBRATE_KV = """\
OUT is a copy of the model with scales of its KV cache under the names that its
container has, or with --overlay a small file of scales alone. --stats takes
statistics of the model or of its unquantized parent, or an overlay. How far
predictions move is measured with scales of 1.0, with the computed ones, and
with one for each head, against a cache that stays wide.

examples:
  narrowcast calibrate-kv MODEL-FP8 OUT --stats stats.safetensors
  narrowcast calibrate-kv MODEL-NVFP4 OUT --text wiki.txt --heads
  narrowcast calibrate-kv MODEL kv.safetensors --overlay --text wiki.txt"""


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help=MODEL)
    add("-o", "--out", required=True, metavar="FILE", help="the file of statistics to make")
    _text_arguments(parser)
    add(
        "--merge", nargs="+", metavar="FILE", help="statistics of one model to put together, instead of MODEL"
    )
    add("--resume", action="store_true", help="go on with a run that was killed")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _calibrate_kv_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("out", metavar="OUT", help="the directory to make; with --overlay the file")
    add("--overlay", action="store_true", help="write the scales alone, as a small file")
    add("--heads", action="store_true", help="one scale for each head instead of each layer")
    add("--stats", metavar="FILE", help="statistics of the model or its parent, or an overlay")
    add("--stat", metavar="STAT", default="amax", help=STAT)
    _text_arguments(parser)
    add("--measure", type=count, metavar="N", help="tokens to measure on (1024; 0 for none)")
    add("--resume", action="store_true", help="go on with a run that was killed while it wrote")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _text_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", action="append", default=[], metavar="FILE", help="text, .jsonl or .parquet (repeatable)")
    add("--tokens", type=count, metavar="N", help="tokens to run (16384)")
    add("--context", type=count, metavar="N", help="tokens that a piece has at most (2048)")
    add("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (as the checkpoint says)")


VERBS = (
    Verb(
        "calibrate", "what enters each layer, for static scales of inputs and KV caches", _CALIBRATE,
        _calibrate_arguments,
    ),
    Verb(
        "calibrate-kv", "give a checkpoint the scales of its KV cache, and measure them", _CALIBRATE_KV,
        _calibrate_kv_arguments,
    ),
)  # fmt: skip
