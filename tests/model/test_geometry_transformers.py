"""An outside oracle: models of transformers without memory for their weights count what our rows count.

Each toy is built on the meta device. The whole count must be equal, and so must every group of matrices under its name
on disk, which transformers writes by turning its own layout back; all that is left must be our vectors.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any

import pytest

from model.geometry_toys import DELTA, HEADS, KIMI, MOE, PLAIN, TOWERS, TOYS, VIT
from model.public_models import Public, public_models
from narrowcast.model.families import geometry
from narrowcast.model.families.towers import DEFAULTS
from narrowcast.model.geometry import Geometry

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed: no transformers oracle")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: no oracle")
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

OTHER_CLASS = {"kimi_k2": "deepseek_v3"}  # ships code of its own, which says it is DeepSeek V3's
NO_CLASS = ("internlm2", "bailing_moe")  # theirs is in their own repositories
OTHERS = re.compile(r"vision|visual|multi_modal|connector|image_newline")
CORRECTIONS = "moe_statics"  # of ERNIE's routers: a buffer elsewhere, a parameter there
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def build(family: str, fields: dict[str, Any]) -> Any:
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(family, **json.loads(json.dumps(fields)))
    kinds = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    with torch.device("meta"):
        for kind in kinds if "vision_config" not in fields else kinds[::-1]:
            if type(config) in kind._model_mapping:
                return kind.from_config(config)
        assert family == "mllama_text_model", f"transformers has no class for {family}"
        return transformers.MllamaForCausalLM(config)


def on_disk(model: Any) -> Counter[str]:
    """Elements by name on disk, numbers replaced; tied once; buffers are none."""
    found: Counter[str] = Counter()
    for name, tensor in revert_weight_conversion(model, dict(model.named_parameters())).items():
        if not OTHERS.search(name) and CORRECTIONS not in name:
            stem = re.sub(r"(\.weight|\.bias|(?<=_proj)_bias)$", "", name)
            found[NUMBER.sub("*", stem)] += tensor.numel()
    return found


def compare(ours: Geometry, theirs: Counter[str]) -> None:
    matrices: Counter[str] = Counter()
    for matrix in ours.matrices:
        matrices[matrix.name] += matrix.parameters
    assert {name: theirs[name] for name in matrices} == dict(matrices)
    assert sum(theirs.values()) - sum(matrices.values()) == ours.vectors


@pytest.mark.parametrize(
    ("family", "fields"), TOYS, ids=[f"{i}-{family}" for i, (family, _) in enumerate(TOYS)]
)
def test_every_group_is_as_large_as_in_transformers(family: str, fields: dict[str, Any]) -> None:
    model = build(family, fields)
    assert not any(OTHERS.search(name) for name, _ in model.named_parameters())
    ours = geometry(model.config.to_dict())
    assert ours.parameters == sum(
        p.numel() for name, p in model.named_parameters() if CORRECTIONS not in name
    )
    compare(ours, on_disk(model))
    assert ours.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("family", "fields"), TOYS, ids=[f"{i}-{family}" for i, (family, _) in enumerate(TOYS)]
)
def test_a_config_as_files_have_it_says_the_same(family: str, fields: dict[str, Any]) -> None:
    """Without the defaults that transformers fills in, our own reading of what is absent is equal to its."""
    full = build(family, fields).config.to_dict()
    said = {name: full[name] for name in full if name in fields or name in NEEDED}
    assert geometry({**said, **fields, "model_type": family}) == geometry(full)


# Fields that every file of a family says and a toy leaves to the class.
NEEDED = {
    "model_type", "num_experts_per_tok", "mamba_dt_rank", "attn_layer_period", "attn_layer_offset",
    "expert_layer_period", "expert_layer_offset", "linear_conv_kernel_dim", "conv_kernel", "n_groups", "expand",
    "time_step_rank", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier", "num_experts",
    "layers_block_type", "sliding_window", "shared_intermediate_size", "attention_chunk_size",
    "max_position_embeddings", "num_kv_shared_layers", "num_mtp_layers", "num_nextn_predict_layers",
    "first_k_dense_replace",
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields"), TOWERS, ids=[family for family, _ in TOWERS])
def test_text_parts_are_counted_under_the_names_of_files(family: str, fields: dict[str, Any]) -> None:
    model = build(family, fields)
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    ours = geometry(config)
    compare(ours, on_disk(model))
    assert "not counted" in ours.notes[-1] or "not counted" in ours.notes[0]


def test_experts_of_qwen3_5_count_the_same() -> None:
    """Files of the hub hold them as stacks, as our names say; transformers would write them one by one."""
    model = build("qwen3_5_moe", {"text_config": {**HEADS, **MOE, **DELTA}, "vision_config": VIT})
    ours = geometry(json.loads(json.dumps(model.config.to_dict(), default=str)))
    assert ours.parameters == sum(on_disk(model).values())


AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 64,
}
THINKERS = [
    ("qwen3_omni_moe", "Qwen3OmniMoeThinkerForConditionalGeneration", {**HEADS, **MOE}),
    ("qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration", PLAIN),
]


@pytest.mark.parametrize(("family", "thinker", "fields"), THINKERS)
def test_thinkers_are_counted_under_the_names_of_files(
    family: str, thinker: str, fields: dict[str, Any]
) -> None:
    """The thinker alone, which stands inside a model with a talker."""
    parts = {"text_config": fields, "vision_config": VIT, "audio_config": AUDIO}
    config = transformers.AutoConfig.for_model(family, thinker_config=parts)
    with torch.device("meta"):
        model = getattr(transformers, thinker)(config.thinker_config)
    theirs = Counter({f"thinker.{name}": n for name, n in on_disk(model).items() if "audio" not in name})
    compare(geometry(json.loads(json.dumps(config.to_dict(), default=str))), theirs)


def test_a_dense_layer_of_kimi_linear_counts_the_same() -> None:
    """transformers would write it under the experts' name; files have it under its own."""
    model = build("kimi_linear", KIMI)
    ours = geometry(model.config.to_dict())
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    assert "model.layers.*.mlp.gate_proj" in {matrix.name for matrix in ours.matrices}


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_defaults_of_nested_parts_are_the_classes_own(family: str) -> None:
    config = transformers.AutoConfig.for_model(family).to_dict()
    stated = {name: config[name] for name in DEFAULTS[family]}
    assert stated == dict(DEFAULTS[family])


IN_TRANSFORMERS = [public for public in public_models() if public.config["model_type"] not in NO_CLASS]


@pytest.mark.parametrize("public", IN_TRANSFORMERS, ids=lambda public: public.name)
def test_public_models_are_as_large_as_their_classes(public: Public) -> None:
    fields = dict(public.config)
    family = OTHER_CLASS.get(fields["model_type"], fields.pop("model_type"))
    model = build(family, {name: value for name, value in fields.items() if name != "model_type"})
    text = sum(p.numel() for name, p in model.named_parameters() if not OTHERS.search(name))
    assert geometry(public.config).parameters == text
