"""config.json and GGUF metadata against llama.cpp's converter and the configurations of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo.source import smollm2_gguf
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model import gguf_toys
from model.gguf_toys import UPSTREAM
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.model.gguf_config import gguf_of_config
from narrowcast.model.gguf_model import GGUFModel
from narrowcast.model.gguf_names import family_of_config
from narrowcast.model.gguf_rope import FREQS, llama3_factors, rope_of_gguf
from narrowcast.store.gguf import GGUFFile

# What we say although the converter leaves it to llama.cpp's default, which is the same number.
SAID = {"rope.freq_base"}
# What other readers of config.json ask for, and transformers 5 does not.
OLDER = ("hidden_activation", "sliding_window_pattern")


@pytest.mark.parametrize("name", gguf_toys.FAMILIES)
def test_metadata_are_those_of_the_converter(name: str, tmp_path: Path) -> None:
    out = gguf_toys.write(tmp_path / "a.gguf", gguf_toys.config(name), gguf_toys.tensors(name), "BF16")
    with GGUFFile(out) as ours, GGUFFile(UPSTREAM / name / "bf16.gguf") as theirs:
        wanted = {key: value for key, value in theirs.fields.items() if key != "general.size_label"}
        assert {key: ours.fields.get(key) for key in wanted} == wanted
        assert {key.partition(".")[2] for key in ours.fields.keys() - wanted.keys()} <= SAID


def loaded(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    config: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    for unsaid in ("dtype", "transformers_version", "_name_or_path", "initializer_range"):
        config.pop(unsaid, None)
    return config


@pytest.mark.parametrize("name", gguf_toys.FAMILIES)
def test_config_comes_back_as_transformers_loads_it(name: str, tmp_path: Path) -> None:
    """Every setting of the loaded config equal to the one the file was made of, but for Mistral, which is a Llama, and
    the token ids, which are the vocabulary's."""
    with GGUFModel.open(UPSTREAM / name / "bf16.gguf") as model:
        ours = loaded(model.config, tmp_path / "ours")
    wanted = loaded(gguf_toys.config(name), tmp_path / "theirs")
    if name == "mistral":
        wanted = loaded(
            gguf_toys.config(name) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, tmp_path
        )
        wanted.pop("sliding_window", None)
    for key in OLDER:
        if key not in wanted:
            ours.pop(key, None)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ours.pop(token) is None
        wanted.pop(token)
    differing = {
        key: (ours.get(key), wanted.get(key))
        for key in ours.keys() | wanted.keys()
        if ours.get(key) != wanted.get(key)
    }
    assert not differing


@pytest.mark.parametrize("name", [name for name in gguf_toys.FAMILIES if name != "gemma"])
def test_config_agrees_with_what_transformers_takes_from_the_file(name: str) -> None:
    theirs = load_gguf_checkpoint(UPSTREAM / name / "bf16.gguf")["config"]
    with GGUFModel.open(UPSTREAM / name / "bf16.gguf") as model:
        ours = model.config
    for key, value in theirs.items():
        if key in ("_model_name_or_path", "rope_scaling"):
            continue
        assert (
            ours[key] == pytest.approx(value, rel=1e-7) if isinstance(value, float) else ours[key] == value
        ), key


def test_the_real_model(tmp_path: Path) -> None:
    with GGUFModel.open(smollm2_gguf()) as model:
        config = loaded(model.config, tmp_path)
        assert (config["hidden_size"], config["num_key_value_heads"], config["rms_norm_eps"]) == (
            576,
            3,
            1e-05,
        )
        assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, True)
        assert config["rope_parameters"]["rope_theta"] == 100000.0


@pytest.mark.parametrize("name", gguf_toys.FAMILIES)
def test_models_compute_the_same(name: str, tmp_path: Path) -> None:
    """The model that the config and tensors of a GGUF file make has the logits of the model it was made of."""
    original = AutoModelForCausalLM.from_pretrained(UPSTREAM / name, dtype=torch.float32).eval()
    with GGUFModel.open(UPSTREAM / name / "bf16.gguf") as model:
        (tmp_path / "config.json").write_text(json.dumps(model.config))
        state = {
            tensor: torch.from_numpy(model.values(tensor, 0, model.shape(tensor)[0]))
            for tensor in model.moves
        }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    back = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for tensor, value in original.state_dict().items():
        if tensor.endswith("norm.weight"):
            value.copy_(state[tensor])  # of Gemma off by the rounding of 1 + w, as the names' test holds
    tokens = torch.randint(0, 64, (1, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, two = original(tokens).logits, back(tokens).logits
    assert torch.equal(one, two)


def test_llama3_factors_are_what_transformers_divides_frequencies_by() -> None:
    for factor, theta, size in ((8.0, 500000.0, 128), (32.0, 500000.0, 64), (8.0, 500000.0, 16)):
        scaling = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = AutoConfig.for_model(
            "llama", head_dim=size, hidden_size=4 * size, num_attention_heads=4, rope_parameters=scaling
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        factors = llama3_factors(theta, size, scaling)
        assert np.allclose(factors, (plain / scaled).numpy(), rtol=1e-5)
        back = rope_of_gguf({"llama.rope.freq_base": theta}, "llama.", {FREQS: factors}, size, 1e4)
        assert back.scaling == {key: value for key, value in scaling.items() if key != "rope_theta"}
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        rope_of_gguf({}, "llama.", {FREQS: factors * 2}, size, 1e4)
    ones = {FREQS: np.ones(8, np.float32)}
    assert rope_of_gguf({}, "llama.", ones, 16, 1e4).scaling is None


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llama", {"hidden_act": "gelu"}, UsageError, "another hidden_act"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, UsageError, "no rotary scaling"),
    ("llama", {"rope_parameters": [1]}, CheckpointError, "no object"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, CheckpointError, "no number"),
    ("llama", {"num_hidden_layers": None}, CheckpointError, "no usable num_hidden_layers"),
    ("llama", {"rms_norm_eps": "small"}, CheckpointError, "no number"),
    ("qwen2", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, UsageError, "llama3 rotary scaling"),
    ("qwen3_moe", {"norm_topk_prob": False}, UsageError, "another norm_topk_prob"),
    ("gemma2", {"query_pre_attn_scalar": 144}, UsageError, "another query_pre_attn_scalar"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 6}, UsageError, "other layer types"),
    ("gemma3_text", {"query_pre_attn_scalar": 168}, UsageError, "another query_pre_attn_scalar"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": 1}}, CheckpointError, "no list"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "words"), REFUSED)
def test_models_that_llama_cpp_would_compute_otherwise(
    name: str, change: Any, error: Any, words: str
) -> None:
    settings = gguf_toys.config(name) | change
    with pytest.raises(error, match=words):
        gguf_of_config(family_of_config(settings), settings, "toy", "BF16")


def test_a_sliding_window_that_llama_cpp_ignores_is_noted() -> None:
    settings = gguf_toys.config("mistral") | {"sliding_window": 4096}
    assert (
        "sliding window of 4096"
        in gguf_of_config(family_of_config(settings), settings, "toy", "F16").notes[0]
    )
    assert not gguf_of_config(
        family_of_config(settings), settings | {"sliding_window": None}, "toy", "F16"
    ).notes


def test_old_spellings_of_configs_say_the_same() -> None:
    new = gguf_toys.config("llama")
    rope = new.pop("rope_parameters")
    old = new | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
    }
    family = family_of_config(new)
    one = gguf_of_config(family, new | {"rope_parameters": rope}, "toy", "BF16")
    two = gguf_of_config(family, old, "toy", "BF16")
    assert one.fields == two.fields
    assert np.array_equal(one.tensors[FREQS], two.tensors[FREQS])


WRONG = {
    "llama.embedding_length": "32", "llama.attention.head_count": 0, "llama.rope.freq_base": "x",
    "llama.attention.layer_norm_rms_epsilon": "x", "llama.attention.key_length": [16, 16], "llama.block_count": 1.5,
    "llama.rope.scaling.type": "odd",
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_metadata_of_wrong_kinds_are_named(key: str, tmp_path: Path) -> None:
    settings = gguf_toys.config("llama") | {"rope_parameters": None}
    path = gguf_toys.write(
        tmp_path / "a.gguf", settings, gguf_toys.tensors("llama"), "BF16", {key: WRONG[key]}
    )
    with pytest.raises(CheckpointError):
        GGUFModel.open(path)
