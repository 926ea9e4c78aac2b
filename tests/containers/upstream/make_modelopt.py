"""ModelOpt checkpoints: ``mtq.quantize`` over four short prompts, then ``export_hf_checkpoint``, all on a CPU."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from fixture import HERE, calibration, fill, fresh, keep, named, toy_model
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import pack_int4_in_uint8
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

PACKAGES = ("nvidia-modelopt", "transformers", "torch")
State = dict[str, torch.Tensor]
FP32 = torch.float32


def adapted(
    config: dict[str, Any], kv: dict[str, Any] | None = None, block: dict[int, int] | None = None
) -> dict:
    """A preset with its block size cut to the toy's, and the rules of a KV preset after its own."""
    config = copy.deepcopy(config)
    for rule in config["quant_cfg"]:
        for part in rule["cfg"] if isinstance(rule.get("cfg"), list) else [rule.get("cfg") or {}]:
            if block and "block_sizes" in part:
                part["block_sizes"] |= block
    if kv:
        config["quant_cfg"] += copy.deepcopy(kv["quant_cfg"])
        config["algorithm"] = config["algorithm"] or "max"
    return config


def export(name: str, config: dict[str, Any], model: Any = None) -> tuple[Path, State]:
    model = model or toy_model()
    inputs = list(calibration())
    mtq.quantize(model, config, lambda m: [m(ids) for ids in inputs])
    where = fresh(name)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=where)
    return where, load_file(where / "model.safetensors")


def unpacked_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """ModelOpt has a packer and no reader: the inverse of ``pack_int4_in_uint8``, checked by packing again."""
    low, high = (packed & 15).to(torch.int8), (packed >> 4).to(torch.int8)
    rows = torch.stack([low, high], 1).reshape(-1, packed.shape[1])
    codes = torch.where(rows > 7, rows - 16, rows).float()
    group = codes.shape[1] // scale.shape[1]
    value = codes * scale.float().repeat_interleave(group, 1)
    assert torch.equal(pack_int4_in_uint8(value, scale.float(), group), packed)
    return value


def decode(state: State, module: str) -> torch.Tensor:
    """The QTensor classes, told to answer in fp32."""
    weight, scale = state[f"{module}.weight"], state[f"{module}.weight_scale"]
    outer = state.get(f"{module}.weight_scale_2")
    n, k = weight.shape
    if weight.dtype == torch.uint8 and outer is not None and scale.dtype == torch.float8_e4m3fn:
        return NVFP4QTensor(torch.Size((n, 2 * k)), FP32, weight).dequantize(
            FP32, scale=scale, double_scale=outer, block_sizes={-1: 2 * k // scale.shape[1]}
        )
    if weight.dtype == torch.uint8 and scale.dtype == torch.uint8:
        return MXFP4QTensor(torch.Size((n, 2 * k)), FP32, weight).dequantize(
            FP32, scale=scale.reshape(-1, 1), block_sizes={-1: 32}
        )
    if weight.dtype == torch.uint8:
        return unpacked_int4(weight, scale)
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(weight.shape, FP32, weight).dequantize(FP32, scale=scale)
    held = FP8QTensor(weight.shape, FP32, weight)
    if scale.ndim == 4:
        grid = scale.reshape(scale.shape[0], scale.shape[2])
        return held.dequantize(FP32, scale=grid, block_sizes={-1: k // grid.shape[1], -2: n // grid.shape[0]})
    return held.dequantize(FP32, scale=scale[:, None] if scale.ndim == 1 else scale)


def fixture(name: str, preset: str, config: dict[str, Any], model: Any = None, decoded_by: str = "") -> None:
    try:
        where, state = export(f"modelopt_{name}", config, model)
    except Exception as problem:
        print(f"modelopt_{name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(HERE / f"modelopt_{name}", ignore_errors=True)
        return
    modules = [key.removesuffix(".weight_scale") for key in state if key.endswith(".weight_scale")]
    keep(
        where.name, {module: decode(state, module) for module in modules},
        f"mtq.quantize({preset}), export_hf_checkpoint", decoded_by or "QTensor.dequantize to fp32", PACKAGES,
    )  # fmt: skip


def mixed() -> dict[str, Any]:
    """FP8 attention beside an NVFP4 MLP: the later rule wins."""
    config = adapted(mtq.NVFP4_DEFAULT_CFG, mtq.FP8_KV_CFG)
    fp8 = {"num_bits": (4, 3), "axis": None}
    for part in ("weight", "input"):
        config["quant_cfg"].append({"quantizer_name": f"*self_attn*{part}_quantizer", "cfg": fp8})
    return config


def qwen3_moe() -> Qwen3MoeForCausalLM:
    shape = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(shape).to(torch.bfloat16).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.ndim >= 2:
                fill(parameter, seed)
    return named(model)


if __name__ == "__main__":
    awq = "derived: the inverse of pack_int4_in_uint8 times weight_scale, checked by packing again; "
    awq += "weights are those of x * pre_quant_scale"
    fixture("fp8_kv", "FP8_DEFAULT_CFG + FP8_KV_CFG", adapted(mtq.FP8_DEFAULT_CFG, mtq.FP8_KV_CFG))
    fixture("fp8_pc_pt", "FP8_PER_CHANNEL_PER_TOKEN_CFG", adapted(mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG))
    fixture("fp8_pb_wo", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, blocks of 32x32",
            adapted(mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, block={-1: 32, -2: 32}))  # fmt: skip
    fixture("nvfp4", "NVFP4_DEFAULT_CFG", adapted(mtq.NVFP4_DEFAULT_CFG))
    fixture(
        "nvfp4_kv_nvfp4", "NVFP4_DEFAULT_CFG + NVFP4_KV_CFG", adapted(mtq.NVFP4_DEFAULT_CFG, mtq.NVFP4_KV_CFG)
    )
    fixture("w4a16_nvfp4", "W4A16_NVFP4_CFG", adapted(mtq.W4A16_NVFP4_CFG))
    fixture("nvfp4_awq", "NVFP4_AWQ_LITE_CFG", adapted(mtq.NVFP4_AWQ_LITE_CFG))
    fixture("mxfp8", "MXFP8_DEFAULT_CFG", adapted(mtq.MXFP8_DEFAULT_CFG))
    fixture("mxfp4", "MXFP4_DEFAULT_CFG", adapted(mtq.MXFP4_DEFAULT_CFG))
    fixture("w4a8_mxfp4_fp8", "W4A8_MXFP4_FP8_CFG", adapted(mtq.W4A8_MXFP4_FP8_CFG))
    fixture("w4a16_awq", "INT4_AWQ_CFG, groups of 32", adapted(mtq.INT4_AWQ_CFG, block={-1: 32}), None, awq)
    fixture(
        "w4a8_awq",
        "W4A8_AWQ_BETA_CFG, groups of 32",
        adapted(mtq.W4A8_AWQ_BETA_CFG, block={-1: 32}),
        None,
        awq,
    )
    fixture("mixed", "NVFP4_DEFAULT_CFG with FP8 attention and FP8_KV_CFG", mixed())
    fixture("nvfp4_moe", "NVFP4_DEFAULT_CFG on Qwen3-MoE", adapted(mtq.NVFP4_DEFAULT_CFG), qwen3_moe())
