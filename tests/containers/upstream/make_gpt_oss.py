"""gpt-oss: experts as MXFP4 blocks and scales, the rest in bf16, loaded and decoded by transformers.

transformers' own MXFP4 writer needs Triton kernels, so the codes and exponents are drawn at random. The down
projection is square on purpose: only the format says which side is the input.
"""

from __future__ import annotations

import json

import torch
from fixture import fill, fresh, keep, named
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if __name__ == "__main__":
    shape = GptOssConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64,
        layer_types=["full_attention"], tie_word_embeddings=False,
    )  # fmt: skip
    model = named(GptOssForCausalLM(shape).to(torch.bfloat16).eval())
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.ndim >= 2 and min(parameter.shape) > 3:
                fill(parameter, seed)
    where = fresh("gpt_oss_mxfp4")
    model.save_pretrained(where)
    state = load_file(where / "model.safetensors")
    drawn = torch.Generator().manual_seed(11)
    at = "model.layers.0.mlp.experts"
    decoded = {}
    for name, (rows, width) in {"gate_up_proj": (128, 64), "down_proj": (64, 64)}.items():
        del state[f"{at}.{name}"]
        blocks = torch.randint(0, 256, (2, rows, width // 32, 16), generator=drawn, dtype=torch.uint8)
        scales = torch.randint(116, 124, (2, rows, width // 32), generator=drawn, dtype=torch.uint8)
        state |= {f"{at}.{name}_blocks": blocks, f"{at}.{name}_scales": scales}
        state[f"{at}.{name}_bias"] = (torch.randn(2, rows, generator=drawn) * 0.1).bfloat16()
        decoded[f"{at}.{name}"] = convert_moe_packed_tensors(blocks, scales)
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((where / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings["quantization_config"] = {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    (where / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    loaded = AutoModelForCausalLM.from_pretrained(where, quantization_config=Mxfp4Config(dequantize=True))
    for name, value in decoded.items():
        assert torch.equal(loaded.get_parameter(name), value), name
    keep(
        where.name, decoded, "save_pretrained in bf16, experts replaced by random blocks and scales",
        "convert_moe_packed_tensors, equal to from_pretrained(dequantize=True); laid out [experts, in, out]",
        ("transformers", "torch"),
    )  # fmt: skip
