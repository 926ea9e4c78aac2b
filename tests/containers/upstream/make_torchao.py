"""torchao tensor subclasses in safetensors: ``from_pretrained`` with ``TorchAoConfig``, then ``save_pretrained``."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from typing import Any

import torch
from fixture import HERE, fresh, keep, narrow_config, toy_model
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Int4Tensor,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    PerRow,
    quant_api,
)
from torchao.quantization.quantize_.workflows.int4 import int4_tensor
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, TorchAoConfig

PACKAGES = ("torchao", "transformers", "torch")


def plain_int4(weight: Int4Tensor) -> torch.Tensor:
    """Int4Tensor has no ``dequantize``; its scale and its float zero lie [group, row]."""
    packed = weight.qdata.to(torch.int16)
    codes = torch.stack([packed & 15, (packed >> 4) & 15], -1).flatten(1)
    codes = torch.where(codes > 7, codes - 16, codes).float()
    scale, zero = (
        part.float().T.repeat_interleave(weight.block_size[-1], 1)
        for part in (weight.scale, weight.zero_point)
    )
    return codes * scale + zero


def decode(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each subclass's ``dequantize``, asked for fp32 where it takes a dtype."""
    decoded: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, TorchAOBaseTensor):
            if isinstance(weight, Int4Tensor):
                decoded[name] = plain_int4(weight)
                continue
            wanted = inspect.signature(type(weight).dequantize).parameters
            decoded[name] = weight.dequantize(torch.float32) if len(wanted) > 1 else weight.dequantize()
    return decoded


def write(name: str, config: Any, decoded_by: str = "", zeros: bool = True) -> None:
    where = fresh(f"torchao_{name}")
    try:
        with tempfile.TemporaryDirectory() as plain:
            toy_model(config=narrow_config(), zeros=zeros).save_pretrained(plain)
            model = AutoModelForCausalLM.from_pretrained(
                plain, quantization_config=TorchAoConfig(config), device_map="cpu", dtype=torch.bfloat16
            )
        model.save_pretrained(where)
        values = decode(model)
        again = decode(AutoModelForCausalLM.from_pretrained(where, device_map="cpu"))
        assert values, "nothing was quantized"
        assert all(torch.equal(values[key], again[key]) for key in values), "the saved file decodes otherwise"
        kind = type(next(m.weight for m in model.modules() if isinstance(m, torch.nn.Linear))).__name__
        keep(where.name, values, f"from_pretrained with TorchAoConfig({type(config).__name__}), save_pretrained",
             decoded_by or f"{kind}.dequantize", PACKAGES)  # fmt: skip
    except Exception as problem:
        print(f"{where.name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(HERE / where.name)


def row_quantize(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torchao takes from mslk (which has no CPU wheel): w = code * scale + zero, the code signed, fp32 zero."""
    blocks = weight.float().reshape(-1, group)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale = (high - low).clamp(min=1e-6) / 15
    codes = ((blocks - low) / scale).round().clamp(0, 15) - 8
    rows = weight.shape[0]
    grid = [part.reshape(rows, -1).T.contiguous() for part in (scale, low + scale * 8)]
    return codes.to(torch.int8).reshape(weight.shape), grid[0], grid[1]


if __name__ == "__main__":
    # The gate asks for the GPU that would multiply; making the tensors does not need it.
    quant_api._check_hardware_support = lambda granularity: None
    int4_tensor.int4_row_quantize_zp = row_quantize
    int4_tensor.pack_int4 = lambda codes: (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    int4 = "derived: code * scale + zero in fp32; codes by mslk's formula, mslk having no CPU wheel"
    # A row of zeros gets the scale 0 from torchao, and 0/0 codes: the float8 fixtures leave zeros out.
    rowwise = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    write("float8_rowwise", rowwise, zeros=False)
    write("int4_weight_only", Int4WeightOnlyConfig(group_size=32), int4)
    write("int8_dynamic", Int8DynamicActivationInt8WeightConfig(version=2))
    write("nvfp4_weight_only", NVFP4WeightOnlyConfig())
    write("mxfp8", MXDynamicActivationMXWeightConfig())
    write("mxfp4", MXDynamicActivationMXWeightConfig(
        activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2))  # fmt: skip
