"""TensorRT-LLM's PyTorch backend: what it loads, at several commits of 2025 and 2026, and how it refuses the rest.

ModelOpt's checkpoints are its own. Of Hugging Face's it reads FP8 in blocks of 128x128, gpt-oss, and of
compressed-tensors four schemes; everything else raises a ValueError. Scales of fused siblings must be equal for NVFP4.

The reader (torch/model_config.py) and the linear modules (torch/modules/linear.py) were read as single files, kernels
were not: which of them runs is not known here, and they are named for the algorithm. The capabilities are those that
have the instruction, 8.0 for weight-only; limits of its own may be higher, and every path says so.
"""

from __future__ import annotations

from typing import Any

from narrowcast.hardware.engines.row import WEIGHT_ONLY, Engine, Kernel, Names, Row, row, sm
from narrowcast.tensors.presets import LinearScheme

_CT, _MO, _FP8 = "compressed-tensors", "modelopt", "fp8"
_SOURCE = "NVIDIA/TensorRT-LLM, _torch/model_config.py (008e0af) and _torch/modules/linear.py"
_CT_ONLY = (
    "compressed-tensors is read as FP8 per channel with FP8 per token, FP8 in blocks of 128x128 with groups of 128, "
    "NVFP4 with NVFP4 inputs, and MXFP4 with wide inputs; everything else raises a ValueError"
)
_TARGETS = (
    "with several config groups, targets must be exact names or re: patterns: a class name such as Linear raises "
    '"config_groups targets matched no checkpoint module"'
)
_SIBLINGS = (
    "input_scale and weight_scale_2 must be identical in fused siblings, or it stops with an assertion"
)
_LIMITS = (
    "from which GPU on TensorRT-LLM itself has this is not known here; the capability is the instruction's"
)
_UE8M0 = "on compute capability 10.0 and 12.0 the weights are quantized once more, to scales that are powers of two"


def _algorithm(name: str, arithmetic: str, low: int) -> tuple[Kernel, ...]:
    return (Kernel(name, arithmetic, sm(low)),)


def _whole_blocks(linear: LinearScheme) -> bool:
    return linear.weight.inner.tile == (128, 128)


_BLOCKS = (Kernel("FP8_BLOCK_SCALES", "fp8", sm(89), fits=_whole_blocks),)
_GPT_OSS = (
    Kernel("W4A8_MXFP4_MXFP8", "mxfp8", sm(100)),
    Kernel("W4A16_MXFP4", WEIGHT_ONLY, sm(80, 99)),
)


def _row(container: str, weights: Names, inputs: Names, **more: Any) -> Row:
    notes = (*more.pop("notes", ()), *((_LIMITS,) if "family" in more else ()))
    return row(container, weights, inputs, notes=notes, **more)


_ROWS = (
    _row(_MO, "fp8_tensor", "fp8_static", family=_algorithm("FP8", "fp8", 89)),
    _row(_MO, "fp8_channel", "fp8_token", family=_algorithm("FP8_PER_CHANNEL_PER_TOKEN", "fp8", 89)),
    _row(_MO, "fp8_block128", "fp8_group", family=_BLOCKS, notes=(_UE8M0,)),
    _row(_MO, "nvfp4", "nvfp4", family=_algorithm("NVFP4", "nvfp4", 100), notes=(_SIBLINGS,)),
    _row(_MO, "nvfp4", "wide", family=_algorithm("W4A16_NVFP4", WEIGHT_ONLY, 80)),
    _row(_MO, "nvfp4", ("fp8_static", "fp8_tensor"), family=_algorithm("W4A8_NVFP4_FP8", "fp8", 100)),
    _row(_MO, "mxfp8", "mxfp8", family=_algorithm("MXFP8", "mxfp8", 100)),
    _row(_MO, "mxfp4", ("fp8_static", "fp8_tensor"), family=_algorithm("W4A8_MXFP4_FP8", "fp8", 100)),
    _row(_MO, "int4", "wide", family=_algorithm("W4A16_AWQ", WEIGHT_ONLY, 80)),
    _row(_MO, "int4", "fp8_static", family=_algorithm("W4A8_AWQ", "fp8", 89)),
    _row(_MO, "int8_channel", "wide", family=_algorithm("W8A16", WEIGHT_ONLY, 80)),
    _row(_MO, "int8_channel", "int8_static", family=_algorithm("W8A8_SQ_PER_CHANNEL", "int8", 80)),
    _row(_MO, (), (), refusal="the algorithm is not one of its QuantAlgo", remedy="nvfp4, mxfp8 or an FP8 preset"),
    _row(_CT, "fp8_channel", "fp8_token", family=_algorithm("FP8_PER_CHANNEL_PER_TOKEN", "fp8", 89), notes=(_TARGETS,)),
    _row(_CT, "fp8_block128", "fp8_group", family=_BLOCKS, notes=(_TARGETS, _UE8M0)),
    _row(_CT, "nvfp4", "nvfp4", family=_algorithm("NVFP4", "nvfp4", 100), notes=(_TARGETS, _SIBLINGS)),
    _row(_CT, "mxfp4", "wide", family=_algorithm("W4A16_MXFP4", WEIGHT_ONLY, 80), notes=(_TARGETS,)),
    _row(
        _CT, ("fp8_tensor",), (), refusal=f"FP8 per tensor is refused: {_CT_ONLY}",
        remedy="fp8_dynamic, or --to modelopt --preset fp8",
    ),
    _row(_CT, (), (), refusal=_CT_ONLY, remedy="fp8_dynamic, fp8_block, nvfp4 or mxfp4a16; or --to modelopt"),
    _row(_FP8, "fp8_block128", "fp8_group", family=_BLOCKS, notes=(_UE8M0,)),
    _row(
        _FP8, "fp8_block", (), refusal="FP8_BLOCK_SCALES only supports block_size=(128,128)", remedy="blocks of 128x128"
    ),
    _row(
        _FP8, "mxfp8", (), refusal="FP8_BLOCK_SCALES only supports block_size=(128,128); MXFP8 is read under "
        "quant_method mxfp8", remedy="--to modelopt",
    ),
    _row(
        _FP8, "fp8_tensor", "fp8_static", refusal="a static activation_scheme is read as FP8 in blocks of 128x128, "
        "which one scale per tensor is not", remedy="--to modelopt, whose FP8 is the same scheme",
    ),
    _row(
        _FP8, (), (), refusal="quant_method fp8 is read with weight_block_size or a static activation_scheme only",
        remedy="fp8_block, or --to compressed-tensors --preset fp8_dynamic",
    ),
    _row("mxfp4", "mxfp4", "wide", family=_GPT_OSS),
)  # fmt: skip

ENGINE = Engine(
    "tensorrt-llm", "PyTorch backend, 2026", _ROWS,
    "{container} is not read by TensorRT-LLM's PyTorch backend", "--to modelopt", sm(80), _SOURCE,
)  # fmt: skip
