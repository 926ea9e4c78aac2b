"""Tensor classes of torchao that ``TorchAoConfig`` alone does not reach: each a layer of one checkpoint.

Made by the classes' own constructors and flattened by the library, so that the file is what it would save. The scales
of some are swizzled over more than 128 rows and a number of columns that four does not divide.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from fixture import fill, fresh, keep
from safetensors.torch import save_file
from torchao.core.config import config_to_dict
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    IntxUnpackedToInt8Tensor,
    IntxWeightOnlyConfig,
    MappingType,
    PerRow,
    PerTensor,
)
from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    IntxUnpackedToInt8TensorActivationQuantization as Activation,
)

AT = "model.layers.0.mlp"


def weight(seed: int, n: int, k: int, zeros: bool = True) -> torch.Tensor:
    made = torch.empty(n, k, dtype=torch.bfloat16)
    fill(made, seed, zeros)
    return made


def layers() -> dict[str, Any]:
    intx = IntxUnpackedToInt8Tensor.from_hp
    uneven = weight(2, 16, 64) + 0.125
    scale, pre = torch.tensor(0.02), torch.linspace(0.5, 2, 64).bfloat16()
    static = Int8Tensor.from_hp(
        weight(5, 16, 64), PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerTensor())
    )
    static.act_quant_scale = torch.tensor([[0.0625]])
    static.act_pre_scale = pre
    mx4 = {"elem_dtype": torch.float4_e2m1fn_x2, "block_size": 32, "scaling_mode": ScaleCalculationMode.RCEIL}
    return {
        "int4_symmetric": intx(weight(0, 16, 64), (1, 32), torch.int4, mapping_type=MappingType.SYMMETRIC),
        "int4_asymmetric": intx(uneven, (1, 32), torch.int4, mapping_type=MappingType.ASYMMETRIC,
                                activation_quantization=Activation.INT8_ASYM_PER_TOKEN),
        "int3_rows": intx(weight(3, 16, 64), (1, 64), torch.int3, mapping_type=MappingType.ASYMMETRIC),
        "int8_asymmetric": Int8Tensor.from_hp(uneven, PerRow(), mapping_type=MappingType.ASYMMETRIC),
        "int8_tensor": Int8Tensor.from_hp(weight(4, 16, 64), PerTensor()),
        "int8_static": static,
        "float8_tensor": Float8Tensor.from_hp(weight(6, 16, 64, False), granularity=PerTensor()),
        "mxfp4_swizzled": MXTensor.to_mx(weight(7, 136, 96), **mx4, is_swizzled_scales=True,
                                         act_quant_kwargs=QuantizeTensorToMXKwargs(**mx4)),
        "mxfp8_linear": MXTensor.to_mx(weight(8, 16, 96), torch.float8_e4m3fn, 32),
        "nvfp4_swizzled": NVFP4Tensor.to_nvfp4(
            weight(9, 136, 96), per_tensor_scale=torch.tensor(0.001), act_per_tensor_scale=scale,
            is_swizzled_scales=True, act_quant_kwargs=QuantizeTensorToNVFP4Kwargs()),
        "nvfp4_one_level": NVFP4Tensor.to_nvfp4(weight(10, 16, 96)),
    }  # fmt: skip


if __name__ == "__main__":
    made = layers()
    where = fresh("torchao_classes")
    state, metadata = flatten_tensor_state_dict(
        {f"{AT}.{name}.weight": value for name, value in made.items()}
    )
    save_file(state, where / "model.safetensors", metadata={"format": "pt", **metadata})
    recipes = FqnToConfig(
        {"a": IntxWeightOnlyConfig(), "b": Int8WeightOnlyConfig(version=2), "c": Float8WeightOnlyConfig()}
    )
    told = config_to_dict(recipes)
    for name in ("MXDynamicActivationMXWeightConfig", "NVFP4WeightOnlyConfig"):
        told["_data"]["fqn_to_config"][name] = {"_type": name, "_version": 1, "_data": {}}
    settings = {"quant_method": "torchao", "quant_type": {"default": told}, "modules_to_not_convert": None}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": settings}
    (where / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    decoded = {}
    for name, value in made.items():
        if isinstance(value, IntxUnpackedToInt8Tensor):
            decoded[f"{AT}.{name}"] = value.to(dtype=torch.float32).dequantize()
        else:
            decoded[f"{AT}.{name}"] = value.dequantize(torch.float32)
    keep(where.name, decoded, "from_hp of each class, flatten_tensor_state_dict", "each class's dequantize",
         ("torchao", "torch"))  # fmt: skip
