"""An outside oracle: tiny models of transformers say by their classes what the table says by names.

Every family is built with a few layers, its modules are compared class by class with ours, and it is saved,
so that the names on disk (which differ from those in memory for most experts) are the library's own.
"""

from __future__ import annotations

import json
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.geometry_toys import TOWER, VIT
from model.names_corpus import Tensor
from narrowcast.model.modules import Module, modules
from narrowcast.model.roles import Role, classify, find_function, find_place

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed: no transformers oracle")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: no oracle")

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "n_group": 1,
}
GDN = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 128}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}

FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "bert"), BASE
    ),
    **dict.fromkeys(("bert", "olmo2", "starcoder2", "phi", "cohere2", "nomic_bert"), BASE),
    "phi3": {**BASE, "pad_token_id": 0},
    "smollm3": {**BASE, "pad_token_id": 0},
    "qwen2_moe": {**BASE, **MOE, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**BASE, **MOE, "mlp_only_layers": [0]},
    "qwen3_next": {**BASE, **MOE, **GDN},
    "mixtral": {**BASE, "num_local_experts": 4},
    "minimax_m2": {**BASE, "num_local_experts": 4},
    "deepseek_v2": {**BASE, **MLA},
    "deepseek_v3": {**BASE, **MLA},
    "deepseek_v32": {**BASE, **MLA, "index_n_heads": 2, "index_head_dim": 16},
    "glm4_moe": {**BASE, **MLA},
    "gpt_oss": {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        **BASE,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 1,
    },
    "granitemoe": {**BASE, "num_local_experts": 4},
    "granitemoeshared": {**BASE, "num_local_experts": 4, "shared_intermediate_size": 48},
    "falcon": SMALL,
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "opt": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 64},
    "gpt2": {**GPT, "n_positions": 64},
    "gptj": {**GPT, "rotary_dim": 8},
    "t5": {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8},
    "lfm2": {**BASE, "layer_types": ["conv", "full_attention"]},
    "gemma3": {"text_config": BASE, "vision_config": TOWER, "mm_tokens_per_image": 4},
    "llava": {
        "text_config": {**BASE, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
    },
    "mistral3": {
        "text_config": {**BASE, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16},
    },
    "qwen3_vl": {"text_config": BASE, "vision_config": VIT},
    "qwen3_vl_moe": {"text_config": {**BASE, **MOE}, "vision_config": VIT},
    "qwen2_audio": {
        "text_config": {**BASE, "model_type": "qwen2"},
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 1,
            "encoder_ffn_dim": 96,
            "encoder_attention_heads": 4,
            "num_mel_bins": 16,
            "max_source_positions": 32,
        },
    },
}

# Linears by class that no engine may treat as one: kernels read the weight itself (see the table's notes).
READ_DIRECTLY = ("x_proj", "dt_proj", "indexer.weights_proj")


@cache
def build(family: str) -> Any:
    """A tiny model with random weights, fp32."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(family, **json.loads(json.dumps(FAMILIES[family])))
    kinds = [
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForMultimodalLM,
    ]
    if "vision_config" in FAMILIES[family]:
        kinds.insert(0, transformers.AutoModelForImageTextToText)
    for kind in kinds:
        if type(config) in kind._model_mapping:
            return kind.from_config(config).eval()
    raise AssertionError(f"transformers has no language model class for {family}")


def on_disk(model: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Names and shapes as transformers writes them, and the config beside them."""
    model.save_pretrained(folder)
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__", None)
    tensors = {name: Tensor(name, tuple(facts["shape"])) for name, facts in header.items()}
    return tensors, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_agree_with_names(family: str) -> None:
    model = build(family)
    config = model.config.to_dict()
    state = {name: Tensor(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    ours = {m.name: m for m in modules(state, config)}
    checked = 0
    for path, layer in model.named_modules():
        weight = f"{path}.weight"
        if weight not in state:
            continue
        if isinstance(layer, torch.nn.Embedding):
            assert ours[path].kind == "Embedding", path
        elif isinstance(layer, torch.nn.Linear):
            assert ours[path].linear is not path.endswith(READ_DIRECTLY), path
            assert ours[path].orientation == "out_in"
            assert ours[path].out_in == (layer.out_features, layer.in_features)
        elif type(layer).__name__ == "Conv1D":
            assert ours[path].linear
            assert ours[path].orientation == "in_out"
            assert ours[path].out_in == (layer.nf, layer.nx)
        elif "Norm" in type(layer).__name__:
            role = classify(weight, state[weight].shape, config)
            assert role in (Role.NORM, Role.VISION, Role.AUDIO), path
        else:
            continue
        checked += 1
    assert checked >= 10


@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_on_disk_is_unknown(family: str, tmp_path: Path) -> None:
    tensors, config = on_disk(build(family), tmp_path)
    unknown = [n for n in tensors if find_function(n) is None and find_place(n, config) is None]
    assert unknown == []
    assert all(m.known and m.problem is None for m in modules(tensors, config))


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_exactly_when_the_model_ties(family: str, tmp_path: Path) -> None:
    model = build(family)
    tensors, config = on_disk(model, tmp_path)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    shares = head is not None and head.weight is table.weight
    tied = [m for m in modules(tensors, config) if m.tied is not None]
    assert bool(tied) == shares


def cut(weight: Any, module: Module) -> dict[str, np.ndarray]:
    """The matrices that ``splits`` describes, by name."""
    array = weight.detach().numpy()
    out = {}
    for split in module.splits():
        matrix = array[split.expert]
        matrix = matrix if module.orientation == "out_in" else matrix.T
        out[split.name] = matrix[split.part.start : split.part.stop : split.part.step]
    return out


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, family: str) -> np.ndarray:
    """One expert in fp64: SiLU gate times up, or gpt-oss's clamped variant."""
    g, u = x @ gate.T.astype(np.float64), x @ up.T.astype(np.float64)
    if family == "gpt_oss":
        g, u = np.minimum(g, 7.0), np.clip(u, -7.0, 7.0)
        return ((u + 1) * (g / (1 + np.exp(-1.702 * g)))) @ down.T
    return (g / (1 + np.exp(-g)) * u) @ down.T


def bound(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """How far an fp32 expert may be from ``gated``, element by element.

    With G = |x||gate|', U = |x||up|' and unit roundoff e: the products are off by at most (H + 1) e G and
    (H + 1) e U, silu and its clamped variant have slope at most 1.1 and are at most G in size, so the inner
    value is off by (2.1 (H + 1) + 8) e G (U + 1), 8 for the elementwise steps; the last product adds I + 1.
    """
    x, gate, up, down = (np.abs(a).astype(np.float64) for a in (x, gate, up, down))
    steps = 2.1 * (gate.shape[1] + 1) + (down.shape[1] + 1) + 8
    return np.asarray(steps * 2.0**-24 * ((x @ gate.T) * (x @ up.T + 1)) @ down.T)


SQUARE = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "intermediate_size_mlp": 16,
}


def square_experts(family: str) -> tuple[str, Any, dict[str, Module]]:
    """The first experts of a tiny model with hidden size = 2 intermediate: path, module, and our modules."""
    kwargs = json.loads(json.dumps(FAMILIES[family]))
    inner = kwargs.get("text_config", kwargs)
    inner |= SQUARE
    config = transformers.AutoConfig.for_model(family, **kwargs)
    torch.manual_seed(1)
    nested = "text_config" in kwargs
    kind = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    model = kind.from_config(config).eval()
    path, experts = next((n, m) for n, m in model.named_modules() if hasattr(m, "gate_up_proj"))
    for name, parameter in experts.named_parameters():
        torch.nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else 0.3)
    state = {n: Tensor(n, tuple(p.shape)) for n, p in model.state_dict().items() if n.startswith(path)}
    said = {**config.to_dict(), "transformers_version": transformers.__version__}
    return path, experts, {m.name: m for m in modules(state, said)}


@pytest.mark.parametrize(
    "family", ["gpt_oss", "llama4_text", "qwen3_moe", "mixtral", "granitemoe", "qwen3_vl_moe"]
)
def test_splits_compute_what_the_experts_compute(family: str) -> None:
    """Field case 13: with H = 2I the stack is square, so only the family can say which axis is which.

    Every expert is run alone through the library's own module and compared with the matrices that ``splits``
    cuts; with the two axes exchanged the same comparison fails.
    """
    path, experts, ours = square_experts(family)
    assert ours[f"{path}.gate_up_proj"].shape == (4, 32, 32)
    matrices: dict[str, np.ndarray] = {}
    for leaf in ("gate_up_proj", "down_proj"):
        matrices |= cut(getattr(experts, leaf), ours[f"{path}.{leaf}"])
    x = torch.randn(3, 32)
    wide = x.numpy().astype(np.float64)
    for e in range(4):
        if family == "llama4_text":
            found = experts(x.repeat(4, 1)).view(4, 3, 32)[e].detach().numpy()
        else:
            found = experts(x, torch.full((3, 1), e), torch.ones(3, 1)).detach().numpy()
        gate, up, down = (matrices[f"{path}.{e}.{leaf}"] for leaf in ("gate_proj", "up_proj", "down_proj"))
        assert down.shape == (32, 16)
        assert (np.abs(found - gated(wide, gate, up, down, family)) <= bound(wide, gate, up, down)).all()
        gate, up = np.split(np.concatenate([gate, up]).T, 2)
        assert (np.abs(found - gated(wide, gate, up, down, family)) > bound(wide, gate, up, down)).any()
