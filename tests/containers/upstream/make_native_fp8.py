"""Native fp8 (``quant_method: "fp8"``) as transformers quantizes, saves, loads and dequantizes it."""

from __future__ import annotations

import json
from typing import Any

import torch
from fixture import fill, fresh, keep, toy_config, toy_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

PACKAGES = ("transformers", "torch")
SKIPPED = ("lm_head", "embed_tokens", "norm")


def quantizer(config: FineGrainedFP8Config) -> FineGrainedFP8HfQuantizer:
    return FineGrainedFP8HfQuantizer(config)


def quantized(state: dict[str, torch.Tensor], config: FineGrainedFP8Config) -> dict[str, torch.Tensor]:
    """``Fp8Quantize`` over every linear weight of a state dict."""
    step = Fp8Quantize(quantizer(config))
    done: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        done.update({name: value} if any(s in name for s in SKIPPED) else step.convert({name: value}))
    return done


def decoded(state: dict[str, torch.Tensor], suffix: str = "_scale_inv") -> dict[str, torch.Tensor]:
    """``Fp8Dequantize`` asked for fp32: the product of code and scale, not yet rounded to the model's dtype."""
    step = Fp8Dequantize(quantizer(FineGrainedFP8Config()))
    pairs = {
        name: name.removesuffix("weight") + suffix if suffix == "scale" else name + suffix for name in state
    }
    return {
        name.removesuffix(".weight"): step._dequantize_one(state[name], state[pairs[name]], torch.float32)
        for name in state
        if pairs[name] in state
    }


def block(name: str, size: tuple[int, int], scale_fmt: str, **shape: Any) -> None:
    """A Llama quantized by the op and loaded by transformers, which on a CPU can save it only dequantized."""
    config = FineGrainedFP8Config(
        weight_block_size=size, scale_fmt=scale_fmt, modules_to_not_convert=["lm_head", "model.embed_tokens"]
    )
    model = toy_model(config=toy_config(**shape))
    where = fresh(name)
    state = quantized({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, config)
    model.config.quantization_config = config
    model.config.dtype = torch.bfloat16
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(where)
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16)
    values = decoded(state)
    for module, value in values.items():
        assert torch.equal(loaded.get_submodule(module).weight, value.bfloat16()), module
    keep(
        name, values, "Fp8Quantize over the bf16 state dict; config.json by save_pretrained",
        "Fp8Dequantize to fp32; from_pretrained on CPU gives the same rounded once to bf16", PACKAGES,
    )  # fmt: skip


def deepseek_v3() -> None:
    """Per-expert names, latent attention, powers of two held in fp32 as V3.1 ships them."""
    config = FineGrainedFP8Config(weight_block_size=(32, 32), scale_fmt="ue8m0")
    shape = DeepseekV3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2, n_shared_experts=1, n_group=1, topk_group=1,
        num_experts_per_tok=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16,
        first_k_dense_replace=1, max_position_embeddings=64, tie_word_embeddings=False, num_nextn_predict_layers=0,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(shape).to(torch.bfloat16).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.ndim >= 2:
                fill(parameter, seed)
    where = fresh("native_fp8_deepseek_v3")
    model.save_pretrained(where)
    plain = load_file(where / "model.safetensors")
    kept = {k: v for k, v in plain.items() if k.endswith("mlp.gate.weight")}
    state = {**quantized({k: v for k, v in plain.items() if k not in kept}, config), **kept}
    state = {k: v.float() if k.endswith("scale_inv") else v for k, v in state.items()}
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((where / "config.json").read_text())
    settings["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
    }  # fmt: skip
    (where / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    values = decoded(state)
    loaded = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16)
    experts = loaded.model.layers[1].mlp.experts
    for e in range(2):
        at = f"model.layers.1.mlp.experts.{e}."
        both = torch.cat([values[at + "gate_proj"], values[at + "up_proj"]])
        assert torch.equal(experts.gate_up_proj[e], both.bfloat16())
        assert torch.equal(experts.down_proj[e], values[at + "down_proj"].bfloat16())
    keep(
        where.name, values, "save_pretrained in bf16, Fp8Quantize per tensor, scales widened to fp32 (V3.1 style)",
        "Fp8Dequantize to fp32; from_pretrained on CPU gives the same rounded once to bf16", PACKAGES,
    )  # fmt: skip


def deepseek_v4() -> None:
    """The released names: ``.scale`` in E8M0 beside ``.weight``, routed experts as packed FP4 in int8."""
    made = {"attn.wq_a": (32, 64), "attn.wkv": (96, 64), "ffn.shared_experts.w1": (32, 64)}
    config = FineGrainedFP8Config(weight_block_size=(32, 32), scale_fmt="ue8m0")
    state: dict[str, torch.Tensor] = {}
    for seed, (name, shape) in enumerate(made.items()):
        weight = torch.empty(shape, dtype=torch.bfloat16)
        fill(weight, seed)
        pair = Fp8Quantize(quantizer(config)).convert({f"layers.0.{name}.weight": weight})
        state |= {k.replace("weight_scale_inv", "scale"): v for k, v in pair.items()}
    drawn = torch.Generator().manual_seed(3)
    for e in range(2):
        for name, (n, k) in {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}.items():
            at = f"layers.0.ffn.experts.{e}.{name}"
            codes = torch.randint(0, 256, (n, k // 2), generator=drawn, dtype=torch.uint8)
            powers = torch.randint(118, 128, (n, k // 32), generator=drawn, dtype=torch.uint8)
            state |= {
                f"{at}.weight": codes.view(torch.int8),
                f"{at}.scale": powers.view(torch.float8_e8m0fnu),
            }
    where = fresh("native_fp8_deepseek_v4")
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 2, "num_hidden_layers": 1,
        "expert_dtype": "fp4", "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32]}}  # fmt: skip
    (where / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    keep(
        where.name, decoded(state, "scale"),
        "derived: a handful of tensors with the released names; fp8 codes by Fp8Quantize, fp4 bytes drawn at random",
        "Fp8Dequantize to fp32 (its int8 path for the fp4 experts)", PACKAGES,
    )  # fmt: skip


def matrices(name: str, shapes: dict[str, tuple[int, int]]) -> None:
    """Blocks of 128. The grid is the ceiling where a matrix does not fill it, and nothing is padded on disk."""
    where = fresh(name)
    state: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for seed, (module, (n, k)) in enumerate(shapes.items()):
        weight = torch.empty(n, k)
        fill(weight, seed)
        padded = torch.zeros(-(-n // 128) * 128, -(-k // 128) * 128)
        padded[:n, :k] = weight
        pair = Fp8Quantize(quantizer(FineGrainedFP8Config())).convert({"weight": padded})
        at = f"model.layers.0.{module}"
        state[f"{at}.weight"] = pair["weight"][:n, :k].contiguous()
        state[f"{at}.weight_scale_inv"] = pair["weight_scale_inv"]
        whole = Fp8Dequantize(quantizer(FineGrainedFP8Config()))._dequantize_one(
            pair["weight"], pair["weight_scale_inv"], torch.float32
        )
        values[at] = whole[:n, :k]
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "hidden_size": 160, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
            "quant_method": "fp8", "weight_block_size": [128, 128]}}  # fmt: skip
    (where / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    keep(
        where.name, values, "tensors by Fp8Quantize; partial blocks derived: zero-padded, quantized, cropped",
        "Fp8Dequantize to fp32; partial blocks derived: of the padded matrix, cropped", PACKAGES,
    )  # fmt: skip


def per_tensor_static() -> None:
    """AutoFP8's layout: amax/448 per tensor, as a scalar, and one input scale per linear."""
    model = toy_model()
    where = fresh("native_fp8_per_tensor_static")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(where)
    settings = json.loads((where / "config.json").read_text())
    settings["dtype"] = "bfloat16"
    settings["quantization_config"] = {
        "activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8",
    }  # fmt: skip
    (where / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    state: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for i, (key, value) in enumerate(model.state_dict().items()):
        if any(s in key for s in SKIPPED):
            state |= {} if key == "lm_head.weight" else {key: value}
            continue
        scale = value.float().abs().amax() / 448
        codes = (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        at = key.removesuffix(".weight")
        state |= {key: codes, f"{at}.weight_scale": scale}
        state[f"{at}.input_scale"] = torch.tensor((i + 3) / 448)
        values[at] = codes.float() * scale
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    made = "derived: amax/448 per tensor, AutoFP8's tensor names"
    keep(where.name, values, made, "derived: code * scale", PACKAGES)


if __name__ == "__main__":
    block("native_fp8_block32", (32, 32), "float")
    block("native_fp8_block32_ue8m0", (32, 32), "ue8m0")
    matrices("native_fp8_block128", {"mlp.gate_proj": (128, 256)})
    deepseek_v3()
    deepseek_v4()
    partial = {
        "self_attn.kv_a_proj_with_mqa": (144, 160),
        "mlp.gate_proj": (40, 160),
        "mlp.down_proj": (160, 40),
    }
    matrices("native_fp8_partial_blocks", partial)
    per_tensor_static()
