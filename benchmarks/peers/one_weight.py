"""The peers' ways to quantize one weight, as a worker of benchmarks/kernels.py: python one_weight.py WEIGHT
ROWS COLUMNS.

- llm-compressor: what its model-free path does with one weight: a Linear, its observer, compressed-tensors'
  compress.
- ModelOpt: the QTensor classes.
- torchao: the tensor subclasses; its int4 one for the CPU stays unpacked, one int8 per weight.
- torchao+compile: the same function under torch.compile, where Inductor accepts it on a CPU.
- torch.compile: amax, scale and cast written in torch by hand; the least code a torch user would write.
- torch: its own cast, for decoding."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from compressed_tensors.compressors.base import compress_module  # noqa: E402
from compressed_tensors.quantization import preset_name_to_scheme  # noqa: E402
from llmcompressor.entrypoints.model_free.lifecycle import (  # noqa: E402
    calibrate_weight,
    initialize_quantized_linear,
)
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor  # noqa: E402
from modelopt.torch.quantization.qtensor.int4_tensor import INT4QTensor  # noqa: E402
from modelopt.torch.quantization.qtensor.int8_tensor import INT8QTensor  # noqa: E402
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor  # noqa: E402
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor  # noqa: E402
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor  # noqa: E402
from serve import serve  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import (  # noqa: E402
    NVFP4Tensor,
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)
from torchao.quantization.granularity import PerRow  # noqa: E402
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor  # noqa: E402
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor  # noqa: E402
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (  # noqa: E402
    IntxUnpackedToInt8Tensor,
)

Tensor = torch.Tensor
Call = Callable[[Tensor], Any]
FP8, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def llm_compressor(preset: str) -> Call:
    """The model-free path of one weight."""

    def call(weight: Tensor) -> torch.nn.Module:
        module = initialize_quantized_linear(weight, preset_name_to_scheme(preset, ["Linear"]), "cpu")
        calibrate_weight(module)
        compress_module(module)
        return module

    return call


def by_hand_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 per row: fp32 amax / 448, divide, clamp, cast."""
    x = w.float()
    scale = x.abs().amax(1, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(FP8), scale


def by_hand_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 per row: fp32 amax / 127.5, divide, clamp, round."""
    x = w.float()
    scale = x.abs().amax(1, keepdim=True) / 127.5
    return (x / scale).clamp(-128, 127).round().to(torch.int8), scale


def by_hand_int4(w: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 in groups of 128, two to a byte, offset by 8."""
    x = w.view(w.shape[0], -1, 128).float()
    scale = (x.abs().amax(2, keepdim=True) / 7.5).to(w.dtype)
    q = ((x / scale.float()).clamp(-8, 7).round() + 8).to(torch.uint8).view(w.shape)
    return q[:, ::2] | (q[:, 1::2] << 4), scale


def by_hand_mxfp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8: the smallest power of two that does not clip, per 32, as a biased byte."""
    x = w.view(w.shape[0], -1, 32).float()
    exponent = torch.ceil(torch.log2(x.abs().amax(2, keepdim=True) / 448)).clamp(-127, 127)
    q = (x * torch.exp2(-exponent)).clamp(-448, 448).to(FP8)
    return q.view(w.shape), (exponent + 127).to(torch.uint8)


def by_hand_decode(w: Tensor) -> Tensor:
    """The cast under torch.compile."""
    return w.to(torch.bfloat16)


def torchao_nvfp4(w: Tensor) -> Tensor:
    """Two-level NVFP4, outer scale from the amax."""
    return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().amax()))


def torchao_nvfp4_plain(w: Tensor) -> Any:
    """What the subclass calls, without the subclass, which Dynamo can trace."""
    return nvfp4_quantize(w, 16, per_tensor_amax_to_scale(w.abs().amax()))


LIBRARIES: dict[str, dict[str, Call]] = {
    "fp8_channel": {
        "llm-compressor": llm_compressor("FP8_DYNAMIC"),
        "ModelOpt": lambda w: FP8QTensor.quantize(w, axis=0),
        "torchao": lambda w: Float8Tensor.from_hp(w, granularity=PerRow()),
    },
    "int8_channel": {
        "llm-compressor": llm_compressor("INT8"),
        "ModelOpt": lambda w: INT8QTensor.quantize(w, axis=0),
        "torchao": lambda w: Int8Tensor.from_hp(w, PerRow()),
    },
    "int4_g128": {
        "llm-compressor": llm_compressor("W4A16"),
        "ModelOpt": lambda w: INT4QTensor.quantize(w, 128),
        "torchao (unpacked)": lambda w: IntxUnpackedToInt8Tensor.from_hp(w, (1, 128), torch.int4),
    },
    "mxfp8": {
        "llm-compressor": llm_compressor("MXFP8"),
        "ModelOpt": lambda w: MXFP8QTensor.quantize(w),
        "torchao": lambda w: MXTensor.to_mx(w, FP8, 32),
    },
    "nvfp4": {
        "llm-compressor": llm_compressor("NVFP4A16"),
        "ModelOpt": lambda w: NVFP4QTensor.quantize(w, 16),
        "torchao": torchao_nvfp4,
    },
    "mxfp4": {
        "llm-compressor": llm_compressor("MXFP4A16"),
        "ModelOpt": lambda w: MXFP4QTensor.quantize(w, 32),
        "torchao": lambda w: MXTensor.to_mx(w, FP4, 32),
    },
    "fp8_decode": {"torch": lambda w: w.to(torch.bfloat16)},
}
COMPILED: dict[str, dict[str, Call]] = {
    "fp8_channel": {"torch.compile": by_hand_fp8},
    "int8_channel": {"torch.compile": by_hand_int8},
    "int4_g128": {"torch.compile": by_hand_int4},
    "mxfp8": {"torch.compile": by_hand_mxfp8},
    "nvfp4": {"torchao+compile": torchao_nvfp4_plain},
    "fp8_decode": {"torch.compile": by_hand_decode},
}


def main() -> None:
    """Load the weight and serve; the decode row starts from its FP8 codes."""
    path, rows, columns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_grad_enabled(False)
    bits = np.fromfile(path, np.uint16).reshape(rows, columns)
    weight = torch.from_numpy(bits).view(torch.bfloat16)
    codes = (weight.float() * 4096).to(FP8)
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    warmups: dict[str, dict[str, Callable[[], Any]]] = {}
    for row, contestants in LIBRARIES.items():
        source = codes if row == "fp8_decode" else weight
        few = source[:64].contiguous()
        calls[row] = {name: (lambda f=f, x=source: f(x)) for name, f in contestants.items()}
        warmups[row] = {name: (lambda f=f, x=few: f(x)) for name, f in contestants.items()}
        for name, f in COMPILED.get(row, {}).items():
            compiled = torch.compile(f)
            calls[row][name] = lambda f=compiled, x=source: f(x)
    serve(calls, warmups)


if __name__ == "__main__":
    main()
