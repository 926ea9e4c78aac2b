"""Checkpoints made of random codes by each format's own definition, beside a dense model of the weights that these
codes stand for: nothing of narrowcast wrote or read either. In float32 the logits are the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.families import logits, tokens, walked
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from narrowcast.runtime.walk import Running

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_bias": True, "pad_token_id": 0,
}  # fmt: skip
Parts = dict[str, torch.Tensor]


def dense(config: Any) -> Any:
    config._experts_implementation = "eager"
    model, dice = AutoModelForCausalLM.from_config(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(torch.randn(one.shape, generator=dice) * 0.15 + float("norm" in name))
    return model


def words(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight codes of four bits to an int32 along ``dim``, the first in the low bits."""
    parts = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = sum(parts[..., i] << 4 * i for i in range(8))
    return torch.as_tensor(packed).to(torch.uint32).view(torch.int32).movedim(-1, dim).contiguous()


def drawn(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [K, N] and zero points [groups, N], 0 to 15, and scales of fp16."""
    dice, groups = torch.Generator().manual_seed(n * k), k // GROUP
    codes = torch.randint(0, 16, (k, n), generator=dice)
    zero = torch.randint(1, 16, (groups, n), generator=dice)
    return codes, zero, ((torch.rand(groups, n, generator=dice) + 0.5) * 0.03).half()


def decoded(codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return ((codes - zero[of]).float() * scale.float()[of]).T.contiguous()


def compressed_tensors(n: int, k: int) -> tuple[torch.Tensor, Parts]:
    codes, zero, scale = drawn(n, k)
    padded = torch.cat([zero, torch.zeros(len(zero), -n % 8)], 1)  # to whole words
    parts = {
        "weight_packed": words(codes.T, 1), "weight_scale": scale.T.float().contiguous(),
        "weight_zero_point": words(padded.T, 0), "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip
    return decoded(codes, zero, scale, torch.arange(k) // GROUP), parts


def awq(n: int, k: int) -> tuple[torch.Tensor, Parts]:
    codes, zero, scale = drawn(n, k)
    lanes = [words(one.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 1) for one in (codes, zero)]
    parts = {"qweight": lanes[0], "qzeros": lanes[1], "scales": scale}
    return decoded(codes, zero, scale, torch.arange(k) // GROUP), parts


def gptq(less: int, shuffled: bool) -> Callable[[int, int], tuple[torch.Tensor, Parts]]:
    def make(n: int, k: int) -> tuple[torch.Tensor, Parts]:
        (codes, zero, scale), of = drawn(n, k), torch.arange(k) // GROUP
        of = of[torch.randperm(k, generator=torch.Generator().manual_seed(k))] if shuffled else of
        parts = {
            "qweight": words(codes, 0),
            "qzeros": words(zero - less, 1),
            "scales": scale,
            "g_idx": of.int(),
        }
        return decoded(codes, zero, scale, of), parts

    return make


def written(model: Any, folder: Path, parts: dict[str, Parts], config: dict[str, Any]) -> Path:
    """The dense model's other tensors, ``parts`` in place of their weights, and ``config`` beside them."""
    kept = {name: one.detach().clone() for name, one in model.named_parameters()}
    for stem, tensors in parts.items():
        kept.pop(f"{stem}.weight" if f"{stem}.weight" in kept else stem)
        kept |= {f"{stem}{'' if leaf[0] == '_' else '.'}{leaf}": one for leaf, one in tensors.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    said = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(said | {"dtype": "float32"}, default=str))
    return folder


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
CT = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": None}},
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "compressed-tensors": (compressed_tensors, CT | {"ignore": ["lm_head"]}),
    "compressed-tensors with the head": (compressed_tensors, CT | {"ignore": []}),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (gptq(1, False), GPTQ | {"desc_act": False, "checkpoint_format": "gptq"}),
    "gptq shuffled": (gptq(1, True), GPTQ | {"desc_act": True, "checkpoint_format": "gptq"}),
    "gptq v2 shuffled": (gptq(0, True), GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}),
}


@pytest.mark.parametrize(
    ("case", "tied"),
    [(case, False) for case in CASES] + [(case, True) for case in ("compressed-tensors", "awq")],
)
def test_int4_around_zero_points(tmp_path: Path, case: str, tied: bool) -> None:
    make, config = CASES[case]
    head = config.get("ignore") == []
    model = dense(LlamaConfig(**SIZES, mlp_bias=True, tie_word_embeddings=tied))
    parts: dict[str, Parts] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (head or name != "lm_head"):
            module.weight.data, parts[name] = make(*module.weight.shape)
    with Running.open(written(model, tmp_path, parts, config), "float32") as run:
        assert torch.equal(walked(run, tokens(24)), logits(model, tokens(24)))


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    """Rows [2·inner] take gate and up in turn, blocks of 32 along the input; transformers holds the transpose."""
    model = dense(
        GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    )
    parts: dict[str, Parts] = {}
    for name, one in model.named_parameters():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            continue
        (count, k, n), dice = one.shape, torch.Generator().manual_seed(len(name))
        codes = torch.randint(0, 16, (count, n, k), generator=dice)
        scales = torch.randint(120, 125, (count, n, k // 32), generator=dice)
        one.data = (
            (FP4[codes] * torch.exp2(scales - 127.0).repeat_interleave(32, 2)).transpose(1, 2).contiguous()
        )
        pairs = codes.to(torch.uint8).unflatten(2, (-1, 16, 2))
        parts[name] = {"_blocks": pairs[..., 0] | pairs[..., 1] << 4, "_scales": scales.to(torch.uint8)}
    assert len(parts) == 4
    with Running.open(written(model, tmp_path, parts, {"quant_method": "mxfp4"}), "float32") as run:
        assert torch.equal(walked(run, tokens(24)), logits(model, tokens(24)))
