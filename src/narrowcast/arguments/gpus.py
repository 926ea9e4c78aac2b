"""What the verb about accelerators takes: gpus."""

from __future__ import annotations

import argparse

from narrowcast.arguments.parser import Verb

_GPUS = """\
GPUs of your own are tables in a TOML file, named by --gpus or by the variable
NARROWCAST_GPUS; every verb that takes --gpu knows them then (docs/gpus.md):

  [gpu.my-card]
  like = "h100"
  bandwidth = 3.9               # TB/s
  peaks = { bf16 = 835 }        # dense TFLOPS

examples:
  narrowcast gpus
  narrowcast gpus H100
  narrowcast gpus "NVIDIA A100-SXM4-40GB"
  narrowcast gpus my-card --gpus gpus.toml
  narrowcast gpus --here"""


def gpus_argument(parser: argparse.ArgumentParser) -> None:
    """The file of own rows, the same for every verb that takes one."""
    parser.add_argument("--gpus", metavar="FILE", help="GPUs of your own (TOML; else NARROWCAST_GPUS)")


def _gpus_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="GPU", help="one GPU; all of them without it")
    parser.add_argument(
        "--here", action="store_true", help="the machine's own GPU, else its processor, measured"
    )
    gpus_argument(parser)


VERBS = (
    Verb(
        "gpus", "GPUs: memory, bandwidth, dense peaks, traps, and who says so", _GPUS, _gpus_arguments
    ),
)  # fmt: skip
