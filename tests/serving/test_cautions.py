"""Each warning is said where the mistake can be made, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowcast.hardware.gpus import gpus
from narrowcast.model.geometry import Attention
from narrowcast.serving.cautions import ROWS, Case, cautions
from narrowcast.serving.loading import from_config
from narrowcast.serving.question import Question
from narrowcast.tensors.presets import presets

LLAMA: dict[str, Any] = {  # Llama-3-8B, the fields that count
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA = LLAMA | {"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}
QWEN2 = LLAMA | {"model_type": "qwen2"}


def case(
    gpu: str, preset: str | None = None, config: dict[str, Any] = LLAMA, *, container: str | None = None,
    crossover: float | None = None, **asked: Any,
) -> Case:  # fmt: skip
    served = from_config("model", config, preset=preset, container=container)
    return Case(served, Question(gpus[gpu], **asked), crossover)


def with_head(preset: str) -> Case:
    """The same checkpoint whose head is quantized as its other layers are."""
    one = case("h100", preset)
    groups = tuple(
        replace(group, linear=presets[preset].linear, nbytes=group.nbytes // 2)
        if group.matrix.leaf == "lm_head" else group for group in one.served.groups
    )  # fmt: skip
    return replace(one, served=replace(one.served, groups=groups))


def latent(one: Case) -> Case:
    """The same with multi-head latent attention."""
    attention = (Attention("latent", 32, 32, 1, 576, 0),)
    return scaled(one, geometry=replace(one.served.geometry, attention=attention))


def scaled(one: Case, **changes: Any) -> Case:
    return replace(one, served=replace(one.served, **changes))


# The row, a case in which it is said, a near one in which it is not.
CASES: list[tuple[str, Case, Case]] = [
    ("fp8-for-speed", case("a100", "fp8_dynamic"), case("l4", "fp8_dynamic")),
    ("fp8-for-speed", case("a100"), case("h100")),
    ("fp8-for-speed", case("rtx 3090", "fp8_block"), case("a100", "w4a16")),
    ("fp4-for-arithmetic", case("h100", "nvfp4"), case("b200", "nvfp4")),
    ("fp4-for-arithmetic", case("h100", "mxfp4"), case("h100", "nvfp4a16")),
    ("emulated", case("mi300x", "mxfp4"), case("mi355x", "fp8_dynamic")),
    ("static-inputs", case("h100", "fp8"), case("h100", "fp8_dynamic")),
    ("static-inputs", case("h100", "fp8"), case("h100", "fp8", QWEN2)),
    ("quantized-head", with_head("fp8_dynamic"), case("h100", "fp8_dynamic")),
    ("fp16-overflow", case("h100", None, GEMMA | {"torch_dtype": "float16"}), case("h100", None, GEMMA)),
    ("fp16-overflow", case("t4", None, GEMMA), case("t4")),
    ("slow-int8", case("b300", "int8"), case("b200", "int8")),
    ("slow-int8", case("b300", "int8"), case("b300", "fp8_dynamic")),
    ("fnuz", case("mi300x", "fp8_dynamic"), case("mi355x", "fp8_dynamic")),
    ("cut-blocks", case("h100", "fp8_block", LLAMA | {"hidden_size": 576, "num_attention_heads": 9,
     "num_key_value_heads": 3}, container="fp8"), case("h100", "fp8_block", container="fp8")),
    ("cut-by-ranks", case("h100", "fp8_block", tp=32), case("h100", "fp8_block", tp=16)),
    ("cut-by-ranks", case("h100", tp=3), case("h100", tp=32)),
    ("replicated-heads", case("h100", tp=16), case("h100", tp=8)),
    ("latent-replicated", latent(case("h100", tp=8)), latent(case("h100"))),
    ("old-fp8-name", case("h100"), case("h100", "fp8_dynamic")),
    ("old-fp8-name", case("h100"), case("h100", engine="sglang")),
    ("arithmetic-at-small-batch", case("h100", "fp8_dynamic", crossover=295.0),
     case("h100", "fp8_dynamic", crossover=295.0, batch=512)),
    ("arithmetic-at-small-batch", case("h100", "fp8_dynamic", crossover=295.0), case("h100", "w4a16", crossover=295.0)),
    ("beyond-positions", case("h100", context=8193), case("h100", context=8192)),
    ("kv-without-scales", case("h100", kv="fp8_e4m3"), scaled(case("h100", kv="fp8_e4m3"), kv_scales=True)),
    ("kv-without-scales", scaled(case("h100"), kv="fp8_e4m3"), case("h100", kv="fp8_per_token_head")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said", "silent"), CASES, ids=[f"{i}-{row[0]}" for i, row in enumerate(CASES)]
)
def test_said_where_it_applies(name: str, said: Case, silent: Case) -> None:
    assert name in [one.name for one in cautions(said)]
    assert name not in [one.name for one in cautions(silent)]


def test_every_row_is_tried() -> None:
    assert {row.name for row in ROWS} == {name for name, _, _ in CASES}


@pytest.mark.parametrize("one", [case for _, case, _ in CASES], ids=range(len(CASES)))
def test_what_why_and_what_instead(one: Case) -> None:
    for found in cautions(one):
        assert all(found.to_json().values()), found
        assert not found.what.endswith(".")


def test_names_of_a_quantized_checkpoint_are_its_own() -> None:
    found = {one.name: one for one in cautions(case("a100", "fp8_dynamic"))}
    assert "fp8_channel with fp8_token inputs" in found["fp8-for-speed"].what
    assert "fp8_block" not in found["fp8-for-speed"].what


def test_replication_is_counted() -> None:
    (found,) = (one for one in cautions(case("h100", tp=16)) if one.name == "replicated-heads")
    assert "each KV head is kept by 2 GPUs" in found.why
