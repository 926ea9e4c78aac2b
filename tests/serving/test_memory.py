"""What fits: worked examples, published sizes, vLLM's own specs, and how everything is spread over GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.public_models import public_models
from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.gpus import gpus
from narrowcast.model.geometry import Attention, Geometry, Matrix
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import E4M3FN
from narrowcast.serving.loading import from_config
from narrowcast.serving.memory import Memory, memory
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.serving.stages import Stage
from narrowcast.tensors.schemes import schemes
from serving.configs import LLAMA3_8B

PUBLIC = {public.name: public for public in public_models()}
SPECS = json.loads((Path(__file__).parents[1] / "hardware" / "vllm_cache_specs.json").read_text())
UNKNOWN = replace(gpus["l4"], name="unknown", memory_gb=None)


def public(name: str, preset: str | None = None) -> Served:
    return from_config(name, PUBLIC[name].config, preset=preset)


def asked(gpu: str = "h200", **more: Any) -> Question:
    return Question(gpus[gpu], **more)


def per_token(served: Served, question: Question) -> int:
    cache = memory(served, question).cache
    assert cache is not None
    return cache.token


# --- worked examples


def test_llama_3_8b_on_an_l4() -> None:
    """Rows 44 and 45 of the seeds: 24 GB, of which a tenth is for the rest; 24 GiB with a sixteenth for check bits."""
    wide = memory(from_config("llama", LLAMA3_8B), asked("l4"))
    assert wide.capacity == 24 * 15 / 16 * 2**30
    assert wide.overhead == pytest.approx(2.4e9, rel=0.01)
    assert wide.total == pytest.approx(16e9, rel=0.01)
    assert wide.tokens is not None
    assert 40_000 <= wide.tokens <= 48_000
    small = memory(from_config("llama", LLAMA3_8B, preset="fp8_dynamic"), asked("l4", kv="fp8"))
    assert small.total == pytest.approx(9e9, rel=0.02)
    assert small.tokens is not None
    assert 190_000 <= small.tokens <= 200_000
    assert 4 <= small.tokens / wide.tokens <= 5


def test_scales_of_a_matrix() -> None:
    """Row 37: per tensor 1, per channel N, in groups N · ⌈K/128⌉, in blocks ⌈N/128⌉ · ⌈K/128⌉."""
    n, k = 1000, 4100
    counts = {"fp8_tensor": 1, "fp8_channel": n, "int4_g128": n * 33, "fp8_block128": 8 * 33}
    assert {name: schemes[name].inner.count((n, k)) for name in counts} == counts


def test_nvfp4_against_16_and_8_bits() -> None:
    """Row 48: 16/4.5 and 8/4.5; here of the linear layers as files hold them."""
    shape = (4096, 4096)
    bits = {name: schemes[name].bits_per_weight(shape) for name in ("nvfp4", "fp8_tensor")}
    assert 16 / bits["nvfp4"] == pytest.approx(3.56, abs=0.01)
    assert bits["fp8_tensor"] / bits["nvfp4"] == pytest.approx(1.78, abs=0.01)
    linear = (Role.ATTENTION, Role.MLP)
    sizes = {
        preset: sum(
            g.nbytes for g in from_config("l", LLAMA3_8B, preset=preset).groups if g.matrix.role in linear
        )
        for preset in (None, "nvfp4a16", "fp8_per_tensor")
    }
    assert sizes[None] / sizes["nvfp4a16"] == pytest.approx(3.56, abs=0.01)
    assert sizes["fp8_per_tensor"] / sizes["nvfp4a16"] == pytest.approx(1.78, abs=0.01)


def test_671_billion_parameters_in_blocks() -> None:
    """Row 49: about 671 GB and 0.16 GB of scales, were every matrix quantized; DeepSeek V3 keeps some of them wide."""
    quantized = {
        **PUBLIC["deepseek-v3"].config,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }
    found = from_config("deepseek-v3", quantized)
    inside = [group for group in found.groups if group.linear is not None]
    parameters = sum(group.matrix.parameters for group in inside)
    scales = sum(group.nbytes for group in inside) - parameters
    assert scales * 671e9 / parameters == pytest.approx(0.16e9, rel=0.03)
    assert found.nbytes == pytest.approx(671e9 + 0.16e9, rel=0.01)
    assert found.nbytes < 700e9


# --- the cache


@pytest.mark.parametrize("name", PUBLIC)
def test_published_bytes_per_token(name: str) -> None:
    """DeepSeek V3 70,272, Llama 3.1 70B 320 KiB, Mixtral 128 KiB, and so on."""
    served = public(name)
    assert per_token(served, asked()) == PUBLIC[name].kv
    if all(a.kind != "latent" for a in served.geometry.attention):
        assert per_token(served, asked(kv="fp8")) == PUBLIC[name].kv // 2


@pytest.mark.parametrize("mode", SPECS["modes"])
@pytest.mark.parametrize(
    ("name", "layers", "heads", "dim"),
    [("llama-3-8b", 32, 8, 128), ("gemma-3-1b", 26, 1, 256), ("gpt-oss-20b", 24, 8, 64)],
)
def test_every_mode_is_as_large_as_vllms_specs(
    mode: str, name: str, layers: int, heads: int, dim: int
) -> None:
    """Grouped and single keys, with and without windows; boundary layers in 16 bits, where vLLM keeps them so."""
    if mode.endswith("_ds_mla"):
        with pytest.raises(UsageError):
            memory(public(name), asked(kv=mode))
        return
    head = {row["mode"]: row["bytes"] for row in SPECS["heads"] if row["k_dim"] == row["v_dim"] == dim}
    wide = 4 if mode.startswith(("turboquant", "ultraquant")) else 0
    assert per_token(public(name), asked(kv=mode)) == heads * (
        (layers - wide) * head[mode] + wide * head["auto"]
    )


def test_hybrids_keep_no_layer_wide() -> None:
    """vLLM's boundary layers are those of models without states."""
    slot = next(r["bytes"] for r in SPECS["heads"] if (r["mode"], r["k_dim"]) == ("turboquant_4bit_nc", 256))
    assert per_token(public("qwen3-coder-next"), asked(kv="turboquant_4bit_nc")) == 12 * 2 * slot


@pytest.mark.parametrize("row", [r for r in SPECS["latents"] if r["dim"] == 576], ids=lambda r: r["mode"])
def test_latents_are_as_large_as_vllms_specs(row: dict[str, Any]) -> None:
    assert per_token(public("deepseek-v3"), asked(kv=row["mode"])) == 61 * row["bytes"]


@pytest.mark.parametrize("row", SPECS["windows"], ids=lambda r: f"{r['kind']}-{r['window']}-{r['context']}")
def test_windows_are_as_large_as_vllms_specs(row: dict[str, Any]) -> None:
    attention = Attention(row["kind"], 1, 8, 8, 128, 128, row["window"])
    geometry = Geometry("toy", 1, 1024, 64, True, (), (attention,), 0)
    cache = memory(Served("toy", geometry, "plain", (), 0, "config"), asked(context=row["context"])).cache
    assert cache is not None
    assert cache.sequence == row["bytes"]
    assert (cache.full, cache.longest) == (0, None)


@pytest.mark.parametrize("row", SPECS["states"], ids=lambda r: f"{r['model']}-{r['tp']}")
def test_states_are_as_large_as_vllms_specs(row: dict[str, Any]) -> None:
    served, tp = public(row["model"]), row["tp"]
    caches = [memory(served, asked(context=context, tp=tp)).cache for context in (1, 1001)]
    assert caches[0] is not None
    assert caches[1] is not None
    states = next(a for a in served.geometry.attention if a.kind == "state").layers * row["bytes"]
    assert caches[0].sequence == states + caches[0].token
    assert caches[1].sequence == states + 1001 * caches[1].token


def test_sglang_keeps_recurrences_in_fp32() -> None:
    """Qwen3 Coder Next: 36 layers of 32 heads of 128 by 128, and 3 times 2 * 2048 + 4096 inputs of the convolution."""
    for engine, size in (("vllm", 2), ("sglang", 4)):
        cache = memory(public("qwen3-coder-next"), asked(engine=engine, context=1)).cache
        assert cache is not None
        assert cache.sequence - cache.token == 36 * (size * 32 * 128 * 128 + 2 * 3 * (2 * 2048 + 4096))


def test_an_indexer_keeps_a_byte_and_its_scale() -> None:
    """vLLM 0.32, DeepseekV32IndexerCache: 128 codes and one float for a token, beside the latent."""
    attention = Attention("latent", 61, 128, 1, 576, 0, index=128)
    geometry = Geometry("toy", 61, 7168, 64, True, (), (attention,), 0)
    assert per_token(Served("toy", geometry, "plain", (), 0, "config"), asked(kv="fp8_ds_mla")) == 61 * (
        656 + 132
    )


def test_borrowed_layers_keep_nothing() -> None:
    attention = Attention("full", 30, 8, 2, 256, 256, kept=10)
    geometry = Geometry("toy", 30, 2048, 64, True, (), (attention,), 0)
    assert per_token(Served("toy", geometry, "plain", (), 0, "config"), asked()) == 10 * 2 * 2 * 256 * 2


def test_windows_let_sequences_grow_more_cheaply() -> None:
    """Gemma 3 27B: beyond 1024 tokens only 10 of 62 layers grow."""
    cache = memory(public("gemma-3-27b"), asked(context=32768)).cache
    assert cache is not None
    each = 16 * 2 * 128 * 2
    assert (cache.token, cache.full) == (62 * each, 10 * each)
    assert cache.sequence == (52 * 1024 + 10 * 32768) * each
    assert cache.longest is not None
    room = memory(public("gemma-3-27b"), asked(context=32768)).room
    assert room is not None
    assert (52 * 1024 + 10 * cache.longest) * each <= room < (52 * 1024 + 10 * (cache.longest + 1)) * each


def test_every_mode_of_the_engine_is_in_the_table() -> None:
    found = memory(public("llama-3-8b"), asked(context=4096, batch=4))
    assert [mode.mode for mode in found.modes] == [row.name for row in CACHE_MODES.of("vllm")]
    assert {mode.mode for mode in memory(public("deepseek-v3"), asked(tp=8)).modes} == {
        "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4_ds_mla",
    }  # fmt: skip
    assert {mode.mode for mode in memory(public("llama-3-8b"), asked(engine="tensorrt-llm")).modes} == {
        "bf16", "fp8_e4m3", "int8", "nvfp4",
    }  # fmt: skip
    asked_for = memory(public("llama-3-8b"), asked(kv="int8_per_token_head")).cache
    assert asked_for is not None
    assert asked_for in memory(public("llama-3-8b"), asked()).modes


def test_a_checkpoints_own_cache_is_the_automatic_one() -> None:
    found = memory(from_config("l", LLAMA3_8B, preset="fp8_dynamic+kv8"), asked()).cache
    assert found is not None
    assert (found.mode, found.token) == ("fp8_e4m3", 65536)


def test_a_cache_that_the_engine_lacks_is_told() -> None:
    found = memory(public("llama-3-8b"), asked(kv="mxfp8"))
    assert any("vLLM has no mxfp8 cache" in line for line in found.assumptions)


# --- what fits


def test_tokens_sequences_and_what_is_spare() -> None:
    found = memory(public("llama-3-8b"), asked("l4", context=8192, batch=5))
    assert found.capacity is not None
    assert found.room == pytest.approx(0.9 * found.capacity - found.total - found.activations)
    assert found.room is not None
    assert (found.sequences, found.fits) == (5, True)
    assert found.tokens == int(found.room / 131072)
    assert found.cache is not None
    assert found.cache.spare == pytest.approx(found.room - 5 * 8192 * 131072)
    more = memory(public("llama-3-8b"), asked("l4", context=8192, batch=6))
    assert more.fits is False
    assert more.smallest == 2
    assert found.smallest == 1


def test_weights_that_do_not_fit_leave_nothing() -> None:
    found = memory(public("llama-3_1-70b"), asked("h100"))
    assert found.room is not None
    assert found.room < 0
    assert (found.fits, found.tokens, found.sequences, found.smallest) == (False, 0, 0, 2)
    assert memory(public("llama-3_1-70b", "w4a16"), asked("h100")).fits is True


def test_what_would_fit_divides_the_heads() -> None:
    """9 query heads go on no even number of GPUs, however small these are."""
    tiny = replace(gpus["l4"], memory_gb=0.25, seen_gib=None)
    served = public("smollm2-135m")
    assert memory(served, Question(tiny, context=64)).smallest is None
    assert memory(served, Question(tiny, context=64, tp=2)).fits is True


def test_nothing_is_said_of_a_gpu_whose_memory_is_not_known() -> None:
    found = memory(public("llama-3-8b"), Question(UNKNOWN))
    assert (found.capacity, found.room, found.fits, found.tokens, found.smallest) == (
        None,
        None,
        None,
        None,
        None,
    )
    assert found.cache is not None
    assert found.cache.token == 131072
    assert "not known" in found.assumptions[0]


def test_a_model_whose_cache_is_not_known() -> None:
    served = public("llama-3-8b")
    bare = replace(served, geometry=replace(served.geometry, attention=()))
    found = memory(bare, asked("l4"))
    assert (found.cache, found.modes, found.fits) == (None, (), None)
    assert any("not known" in line for line in found.assumptions)


def test_vllm_takes_activations_from_its_budget() -> None:
    served = public("llama-3_1-70b", "w4a16")
    some, none = (memory(served, asked("h100", utilisation=share)) for share in (0.9, 1.0))
    assert some.activations == none.activations
    # 8192 tokens, twice the residual and gate and up of 28672
    assert some.activations == 2 * 8192 * (2 * 8192 + 2 * 28672)
    capacity = 0.99 * 80 * 2**30
    assert some.room == pytest.approx(0.9 * capacity - some.total - some.activations)
    assert none.room == pytest.approx(capacity - none.total - none.activations)
    assert "taken from the cache" in " ".join(some.assumptions)
    many = memory(served, asked("h100", batch=1024))
    assert many.activations == 16 * 1024 * 128256  # logits in fp32, sorted, and their indices
    small = memory(served, asked("rtx pro 6000", batch=1))
    assert small.activations == some.activations
    assert memory(served, asked("l40s")).activations == some.activations / 4  # 2048 tokens at once


def test_other_engines_leave_activations_to_the_rest() -> None:
    served = public("llama-3_1-70b", "w4a16")
    some, none = (memory(served, asked("h100", engine="sglang", utilisation=share)) for share in (0.9, 1.0))
    assert some.activations == 2 * 8192 * (2 * 8192 + 2 * 28672) + 4 * 128256
    capacity = 0.99 * 80 * 2**30
    assert some.room == pytest.approx(0.9 * capacity - some.total)
    assert none.room == pytest.approx(capacity - none.total - none.activations)
    assert "taken from the cache" in " ".join(none.assumptions)


# --- spread over GPUs


def weights(found: Memory) -> dict[str, int]:
    return dict(found.weights)


def test_tensor_parallelism_splits_matrices_and_copies_vectors() -> None:
    served = public("llama-3-8b")
    one, two = (weights(memory(served, asked(tp=tp))) for tp in (1, 2))
    for name in ("embedding", "attention", "mlp", "output head"):
        assert 2 * two[name] == one[name]
    assert two["vectors"] == one["vectors"]


def test_few_key_heads_are_copied() -> None:
    served = public("qwen3-30b-a3b")  # 4 key heads
    tokens = {tp: per_token(served, asked(tp=tp)) for tp in (1, 2, 4, 8)}
    assert tokens == {1: 98304, 2: 49152, 4: 24576, 8: 24576}
    keys = [g for g in served.groups if g.matrix.leaf in ("k_proj", "v_proj")]
    rest = [g for g in served.groups if g.matrix.role is Role.ATTENTION and g not in keys]
    found = weights(memory(served, asked(tp=8)))["attention"]
    assert found == sum(g.nbytes for g in keys) // 4 + sum(g.nbytes for g in rest) // 8
    assert any("kept more than once" in line for line in memory(served, asked(tp=8)).assumptions)


def test_heads_of_one_tensor_are_copied_too() -> None:
    served = public("phi-4")  # 40 query and 10 key heads in one matrix
    fused = next(g for g in served.groups if g.matrix.leaf == "qkv_proj")
    o = next(g for g in served.groups if g.matrix.leaf == "o_proj")
    each = fused.nbytes // (40 + 2 * 10)
    found = weights(memory(served, asked(tp=20)))["attention"]
    assert found == each * (2 + 2) + o.nbytes // 20


def test_a_latent_is_not_split() -> None:
    served = public("deepseek-v3", "fp8_block")
    assert per_token(served, asked(tp=8)) == per_token(served, asked(tp=1)) == 70272


def test_experts_are_split_or_spread() -> None:
    served = public("qwen3-30b-a3b")
    experts = sum(g.nbytes for g in served.groups if g.matrix.role is Role.EXPERT)
    assert weights(memory(served, asked(tp=4)))["experts"] == experts // 4
    assert weights(memory(served, asked(tp=4, ep=True)))["experts"] == experts // 4
    # 128 experts over 6 GPUs: 22 on the fullest.
    uneven = replace(served, geometry=replace(served.geometry, attention=()))
    assert weights(memory(uneven, asked(tp=6, ep=True)))["experts"] == experts * 22 // 128


def test_a_vocabulary_is_padded() -> None:
    matrix = Matrix("model.embed_tokens", Role.EMBEDDING, (1030, 64), split="column")
    geometry = Geometry("toy", 1, 64, 1030, True, (matrix,), (Attention("full", 1, 4, 4, 64, 64),), 0)
    served = Served("toy", geometry, "plain", (Group(matrix, None, 131_840),), 0, "config")
    assert memory(served, asked()).weights["embedding"] == 1088 * 64 * 2
    assert memory(served, asked(engine="transformers")).weights["embedding"] == 131_840


def test_the_fullest_stage_of_a_pipeline_counts() -> None:
    served = public("llama-3-8b")
    found = memory(served, asked(pp=3))
    # get_pp_indices(32, rank, 3) gives 11, 11 and 10 layers; the embedding stands before, the head behind.
    assert found.stage == 0
    linear = sum(g.nbytes for g in served.groups if g.matrix.role in (Role.ATTENTION, Role.MLP))
    assert found.weights["attention"] + found.weights["mlp"] == pytest.approx(linear * 11 / 32, abs=2)
    assert found.weights["embedding"] == 128256 * 4096 * 2
    assert "output head" not in found.weights
    for stage, copies in ((0, 1), (1, 0), (2, 1)):  # each end of a tied model has a copy
        weights = Stage(public("smollm2-135m"), asked(pp=3), stage, 1 / 3).weights
        assert weights.get("embedding", 0) == copies * 49152 * 576 * 2
    with pytest.raises(UsageError, match="33 stages"):
        memory(served, asked(pp=33))


def test_layers_are_dealt_out_as_vllm_does() -> None:
    """get_pp_indices(30, rank, 4) gives 7, 8, 8, 7 layers."""
    served = public("smollm2-135m")
    found = memory(served, asked(pp=4, context=1 << 20, batch=64))
    cache = found.cache
    assert cache is not None
    assert cache.token * 30 == per_token(served, asked()) * 8
    assert found.stage == 1


def test_towers_are_on_the_first_stage_and_mtp_is_not_loaded() -> None:
    served = public("smollm2-135m")
    tower = Matrix("visual.blocks.*.attn.qkv", Role.VISION, (3072, 1024), 24)
    mtp = Matrix("model.layers.30.mlp.up_proj", Role.MTP, (1536, 576))
    more = (Group(tower, None, 150_994_944), Group(mtp, None, 1_769_472, E4M3FN))
    found = memory(replace(served, groups=(*served.groups, *more), tower_bytes=1000), asked())
    assert found.weights["towers"] == 150_994_944 + 1000
    assert found.total == memory(served, asked()).total + found.weights["towers"]
    assert any("speculative" in line for line in found.assumptions)


def test_json_has_every_number() -> None:
    found = memory(public("llama-3-8b"), asked("l4"))
    told = json.loads(json.dumps(found.to_json()))
    assert told["weights"]["total"] == found.total
    assert told["cache"]["bytes_per_token"] == 131072
    assert len(told["modes"]) == len(found.modes)
    assert told["fits"] is True
