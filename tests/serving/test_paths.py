"""Kernels of whole models: the three conditions in words, against vLLM's source and against what its CPU build did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA3_8B, LLAMA3_70B, QWEN3_8B

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import ENGINES
from narrowcast.hardware.gpus import gpus
from narrowcast.model.families import geometry
from narrowcast.model.roles import Role
from narrowcast.serving.loading import from_config
from narrowcast.serving.online import kernels_online, online
from narrowcast.serving.paths import Kernels, attends, kernels
from narrowcast.serving.question import Question
from narrowcast.serving.ranks import held, layer
from narrowcast.serving.served import Group, Served
from narrowcast.serving.splits import splits
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes

ROOT = Path(__file__).parents[2]
CT, FP8, MO, QUARK = "compressed-tensors", "fp8", "modelopt", "quark"
SMOLLM2: dict[str, Any] = {  # HuggingFaceTB/SmolLM2-135M
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def rows(
    config: dict[str, Any], preset: str | None, gpu: str, container: str = CT, **asked: Any
) -> list[Kernels]:
    served = from_config("model", config, preset=preset, container=container if preset else None)
    return list(kernels(served, Question(gpus[gpu], **asked)))


def first(config: dict[str, Any], preset: str, gpu: str, container: str = CT, **asked: Any) -> Kernels:
    """The first answer about quantized layers."""
    return next(row for row in rows(config, preset, gpu, container, **asked) if row.conditions is not None)


def test_cpu_answers_are_what_the_cpu_build_did() -> None:
    """55 files of SmolLM2-135M in vLLM's CPU build: loaded exactly where no layer is refused and one rank is whole.

    Of its own fp8 container it checks no fused layer and loads what is then wrong, which the split's notes say.
    """
    files = json.loads((ROOT / "engines" / "results.json").read_text())["avx512_bf16"]["files"]
    tried = 0
    for name, run in files.items():
        container, preset = name.split("/")
        served = from_config("SmolLM2-135M", SMOLLM2, preset=preset, container=container)
        answers, split = kernels(served, Question(gpus["cpu"])), splits(served, "vllm")
        refused = [row for row in answers if row.path.refusal is not None]
        if run["loads"] and 1 not in split.tp:
            assert container == "fp8"
            assert not refused
            assert any("does not refuse a cut block" in note for row in split.rows for note in row.notes)
        else:
            assert (not refused and 1 in split.tp) is run["loads"], (name, refused, split.first)
        tried += 1
    assert tried == len(files) > 50


# Read out of the 0.32.0 wheel; files are in model_executor/kernels/linear unless they say otherwise.
TRIPLES = [
    # compressed_tensors.py:896 W8A8 from 8.9 (schemes/compressed_tensors_w8a8_fp8.py:85); list: __init__.py:443
    (CT, "fp8_dynamic", "l4", "computes in fp8", "CutlassFP8"),
    (CT, "fp8_dynamic", "rtx 4090", "computes in fp8", "CutlassFP8"),
    (CT, "fp8_dynamic", "h100", "computes in fp8", "CutlassFP8"),
    (CT, "fp8_dynamic", "b200", "computes in fp8", "CutlassFP8"),  # flashinfer.py:63 per tensor only
    (CT, "fp8", "b200", "computes in fp8", "FlashInferFP8"),  # scaled_mm/flashinfer.py:50
    (CT, "fp8", "h100", "computes in fp8", "CutlassFP8"),
    # compressed_tensors.py:908 below that W8A16; list: __init__.py:506; scaled_mm/marlin.py:42 from 7.5
    (CT, "fp8_dynamic", "a100", "weight only", "MarlinFP8"),
    (CT, "fp8_dynamic", "a10", "weight only", "MarlinFP8"),
    (CT, "fp8", "rtx 3090", "weight only", "MarlinFP8"),
    (CT, "fp8_block", "a100", "weight only", "MarlinFP8"),
    # blocks: __init__.py:478; deep_gemm.py:51 Hopper and Blackwell; CUTLASS from 9.0; Marlin before Triton
    (CT, "fp8_block", "h100", "computes in fp8", "FlashInferFp8DeepGEMMDynamicBlockScaled"),
    (CT, "fp8_block", "b200", "computes in fp8", "DeepGemmFp8Block"),
    (CT, "fp8_block", "l40s", "weight only", "MarlinFP8"),
    (FP8, "fp8_block", "l4", "weight only", "MarlinFP8"),
    # INT8: __init__.py:431; schemes/compressed_tensors_w8a8_int8.py:37 from 7.5; CUTLASS raises from 10.0
    (CT, "int8", "a100", "computes in int8", "CutlassInt8"),
    (CT, "int8", "t4", "computes in int8", "CutlassInt8"),
    (CT, "int8", "l4", "computes in int8", "CutlassInt8"),
    (CT, "int8", "b200", "refused", ""),
    (CT, "int8", "b300", "refused", ""),
    (CT, "int8", "rtx 5090", "refused", ""),
    # integers alone: __init__.py:523; machete.py:33 capability 9.0
    (CT, "w4a16", "h100", "weight only", "Machete"),
    (CT, "w4a16", "a100", "weight only", "Marlin"),
    (CT, "w4a16", "b200", "weight only", "Marlin"),
    ("awq", "w4a16_asym", "l4", "weight only", "Marlin"),
    ("gptq", "w4a16", "h100", "weight only", "Machete"),
    # W4A8 FP8: schemes/compressed_tensors_w4a8_fp8.py:67 and compressed_tensors.py:651, 9.0 exactly
    (CT, "w4afp8", "h100", "computes in fp8", "CutlassW4A8"),
    (CT, "w4afp8", "b200", "refused", ""),
    (CT, "w4afp8", "l4", "refused", ""),
    # NVFP4: __init__.py:574; flashinfer.py:122 CuTe DSL on 10.x; marlin.py:27 elsewhere
    (CT, "nvfp4", "b200", "computes in nvfp4", "FlashInferCuteDslNvFp4"),
    (CT, "nvfp4", "gb300", "computes in nvfp4", "FlashInferCuteDslNvFp4"),
    (CT, "nvfp4", "rtx 5090", "computes in nvfp4", "FlashInferCutlassNvFp4"),
    (MO, "nvfp4", "h100", "weight only", "MarlinNvFp4"),
    (CT, "nvfp4", "l4", "weight only", "MarlinNvFp4"),
    (CT, "nvfp4", "a100", "weight only", "MarlinNvFp4"),
    (CT, "nvfp4", "mi300x", "emulated", "EmulationNvFp4"),
    # MXFP4, MXFP8: __init__.py:607 and 552; mxfp4/flashinfer.py:28 from 10.0; mxfp8/flashinfer.py:139 10.x
    (CT, "mxfp4", "b200", "computes in mxfp4", "FlashInferMxFp4"),
    (CT, "mxfp4", "h100", "weight only", "MarlinMxFp4"),
    (CT, "mxfp8", "b200", "computes in mxfp8", "FlashInferCutedslMxfp8"),
    (CT, "mxfp8", "rtx 5090", "computes in mxfp8", "FlashInferCutlassMxfp8"),
    (CT, "mxfp8", "a100", "weight only", "MarlinMxfp8"),
    # AMD
    (CT, "fp8_dynamic", "mi300x", "computes in fp8", "RowWiseTorchFP8"),
    (CT, "fp8_dynamic", "mi250x", "refused", ""),
    (CT, "mxfp8", "mi355x", "computes in mxfp8", "RocmDotScaledMxfp8"),  # mxfp8/rocm_native.py:238
]


@pytest.mark.parametrize(("container", "preset", "gpu", "verdict", "kernel"), TRIPLES)
def test_triples(container: str, preset: str, gpu: str, verdict: str, kernel: str) -> None:
    row = first(LLAMA3_8B, preset, gpu, container)
    assert row.verdict.startswith(verdict)
    assert next(iter(row.path.kernels), "") == kernel


# Container × preset × GPU → instruction, kernel, inputs. Weight-only by design differs from weight-only by need.
CONDITIONS = [
    ("fp8_dynamic", "l4", True, True, True),
    ("fp8_dynamic", "a100", False, False, True),  # no instruction
    (
        "fp8_block",
        "l4",
        True,
        False,
        True,
    ),  # an instruction, inputs, and no kernel: CUTLASS has blocks from 9.0
    ("w4a16", "a100", True, False, False),  # A100 multiplies INT4; nothing quantizes the inputs
    ("w4a16", "h100", False, False, False),
    ("nvfp4", "b200", True, True, True),
    ("nvfp4", "h100", False, False, True),
    ("nvfp4a16", "b200", True, False, False),  # the inputs alone are missing
    ("int8", "b200", True, False, True),  # the engine refuses
    ("mxfp4a16", "b200", True, True, True),  # the engine quantizes inputs that the checkpoint keeps wide
]


@pytest.mark.parametrize(("preset", "gpu", "instruction", "kernel", "inputs"), CONDITIONS)
def test_three_conditions(
    preset: str, gpu: str, instruction: bool | None, kernel: bool | None, inputs: bool
) -> None:
    found = first(LLAMA3_8B, preset, gpu).conditions
    assert found is not None
    assert (found.instruction, found.kernel, found.inputs) == (instruction, kernel, inputs)


def test_words_say_which_condition_is_missing() -> None:
    row = first(LLAMA3_8B, "fp8_dynamic", "a100")
    assert row.verdict == "weight only: decoded and multiplied in bf16"
    assert row.why == (
        "instruction: a100 does not multiply FP8",
        "kernel: MarlinFP8 decodes the weights to 16 bits",
        "inputs: quantized on the fly where a kernel takes them so, left wide by this one",
    )
    assert "int8 is computed in int8 on a100" in row.change
    assert any("computes in fp8 on NVIDIA from compute capability 8.9" in each for each in row.change)
    real = first(LLAMA3_8B, "nvfp4", "b200")
    assert real.why[1] == "kernel: FlashInferCuteDslNvFp4 multiplies in it"
    assert real.change == ()
    wide = first(LLAMA3_8B, "nvfp4a16", "b200")
    assert wide.why[2] == "inputs: kept wide"
    assert "nvfp4 is computed in nvfp4 on b200" in wide.change
    assert first(LLAMA3_8B, "w4a16", "t4").verdict == "weight only: decoded and multiplied in fp16"


def test_the_same_arithmetic_by_another_preset() -> None:
    row = first(LLAMA3_8B, "nvfp4", "h100")
    assert row.change[0] == "nvfp4a16 is the same arithmetic here and leaves the inputs wide on every GPU"


def test_a_side_that_a_kernel_refuses_is_named() -> None:
    """SmolLM2 on Hopper: Machete takes N in multiples of 128, and q, k and v are one layer of 960 rows."""
    answers = {row.names: row for row in rows(SMOLLM2, "w4a16", "h100") if row.conditions is not None}
    marlin = next(row for names, row in answers.items() if "q_proj" in names)
    assert marlin.path.kernels[0] == "Marlin"
    assert "q_proj, k_proj, v_proj: N = 960 is not a multiple of 128, which Machete asks for" in marlin.change
    gates = next(row for names, row in answers.items() if "gate_proj" in names)
    assert gates.path.kernels[0] == "Machete"  # 2 x 1536


def test_ranks_change_the_kernel() -> None:
    """Llama 3 8B over 32 ranks: down_proj has K = 448, which Machete's 64 divide, and qkv 128 + 128 + 128 rows."""
    served = from_config("model", LLAMA3_8B, preset="w4a16")
    shapes = {group.matrix.leaf: layer(group, served, "vllm", 32) for group in served.groups}
    assert shapes["down_proj"] == (4096, 448)
    assert shapes["q_proj"] == shapes["k_proj"] == (384, 4096)  # eight key heads, each on four ranks
    assert shapes["up_proj"] == (896, 4096)
    alone = {group.matrix.leaf: layer(group, served, "transformers", 1) for group in served.groups}
    assert alone["q_proj"] == (4096, 4096)


def test_experts_and_ranks() -> None:
    served = from_config("model", DEEPSEEK_V3, preset="fp8_block")
    expert = next(
        group.matrix
        for group in served.groups
        if group.matrix.role is Role.EXPERT and group.matrix.leaf == "gate_proj"
    )
    assert held(expert, 8) == (256, 7168)
    assert held(expert, 8, ep=True) == (2048, 7168)


def test_wide_layers_are_a_row() -> None:
    found = [row for row in rows(LLAMA3_8B, "fp8_dynamic", "l4") if row.conditions is None]
    assert [(row.names, row.verdict) for row in found] == [(("embed_tokens", "lm_head"), "bf16")]
    assert found[0].why == ("not quantized: embedding and lm_head",)
    assert found[0].path.arithmetic == "bf16"
    plain = rows(LLAMA3_8B, None, "l4")
    assert len(plain) == 1
    assert plain[0].verdict == "bf16"


def test_traps_are_told_where_they_apply() -> None:
    assert any("about 0.15 POPS" in note for note in first(LLAMA3_8B, "int8", "b300").notes)
    assert any("E4M3FNUZ" in note for note in first(LLAMA3_8B, "fp8_dynamic", "mi300x").notes)
    assert any("half rate" in note for note in first(LLAMA3_8B, "fp8_dynamic", "rtx 4090").notes)
    assert not any("half rate" in note for note in first(LLAMA3_8B, "int8", "rtx 4090").notes)
    assert not any("E4M3FNUZ" in note for note in first(LLAMA3_8B, "w4a16", "mi300x").notes)


def test_what_is_not_known_is_said() -> None:
    for gpu in ("tpu v6e", "gaudi3"):
        row = first(LLAMA3_8B, "fp8_dynamic", gpu)
        assert row.verdict == "unknown"
        assert "no kernels known here" in row.why[0]
        assert row.change == ()


def test_a_package_is_named() -> None:
    row = first(SMOLLM2, "w4afp8", "h100")  # groups of 64: CUTLASS takes 128
    assert row.verdict == "computes in fp8, with humming installed"
    assert "without humming installed, the engine refuses" in row.change
    # MXFP4 is computed there with AITER alone.
    assert first(LLAMA3_8B, "mxfp4", "mi355x").verdict == "computes in mxfp4, with aiter installed"
    told = first(LLAMA3_8B, "w4a16", "mi355x").change
    assert told
    assert not any("mxfp4" in line for line in told)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_every_engine_preset_and_gpu_has_an_answer(engine: str) -> None:
    for preset in presets:
        container = FP8 if preset == "fp8_block_ue8m0" else CT  # compressed-tensors has no such scales
        served = from_config("model", QWEN3_8B, preset=preset, container=container)
        for gpu in gpus.values():
            for row in kernels(served, Question(gpu, engine=engine)):
                assert row.verdict, (preset, gpu.name)
                json.dumps(row.to_json())


def test_groups_are_shared_out_once() -> None:
    served = from_config("model", DEEPSEEK_V3, preset="fp8_block")
    found = kernels(served, Question(gpus["h200"], tp=8))
    assert sorted(group.matrix.name for row in found for group in row.groups) == sorted(
        group.matrix.name for group in served.groups
    )
    experts = next(row for row in found if row.groups[0].matrix.role is Role.EXPERT)
    assert experts.verdict == "computes in fp8"


def test_attention_of_a_model() -> None:
    """gpt-oss has sinks, which FlashAttention 2 and FlashInfer on Ampere do not."""
    served = from_config("model", GPT_OSS_20B)
    found = attends(served, Question(gpus["a100"]))
    assert {each.path.backends for each in found} == {("TRITON_ATTN",)}
    assert {each.attention.kind for each in found} == {"full", "sliding"}
    llama = from_config("model", LLAMA3_70B, preset="fp8_dynamic")
    assert attends(llama, Question(gpus["h100"], kv="fp8"))[0].path.arithmetic == "fp8"
    assert attends(llama, Question(gpus["a100"], kv="fp8"))[0].path.arithmetic == "bf16: dequantized"
    assert attends(llama, Question(gpus["a100"]))[0].path.arithmetic == "bf16"


def test_a_checkpoint_asks_for_its_own_cache() -> None:
    served = from_config("model", LLAMA3_8B, preset="fp8_dynamic+kv8")
    assert attends(served, Question(gpus["h100"]))[0].path.storage == "fp8_e4m3"
    assert attends(served, Question(gpus["h100"], kv="bf16"))[0].path.storage == "bf16"


# vLLM and SGLang while loading: name, GPU → verdict. online/fp8.py, mxfp8.py, mxfp4.py; names' own rows.
ONLINE = [
    ("vllm", "fp8_per_tensor", "l4", "computes in fp8"),
    ("vllm", "fp8_per_tensor", "a100", "weight only"),
    ("vllm", "fp8_per_channel", "h100", "computes in fp8"),
    ("vllm", "fp8_per_channel", "a100", "refused"),  # FP8 PTPC online quant requires a kernel that honors ...
    ("vllm", "fp8_per_block", "h100", "computes in fp8"),
    ("vllm", "fp8_per_block", "l4", "weight only"),
    ("vllm", "mxfp8", "b200", "computes in mxfp8"),
    ("vllm", "mxfp8", "h100", "weight only"),
    ("vllm", "mxfp4", "b200", "computes in mxfp4"),
    ("vllm", "mxfp4", "t4", "refused"),  # asks for 8.0
    ("sglang", "fp8", "l4", "computes in fp8"),
    ("sglang", "fp8", "a100", "weight only"),
    ("sglang", "mxfp8", "b200", "computes in mxfp8"),
    ("sglang", "mxfp8", "h100", "refused"),
]


@pytest.mark.parametrize(("engine", "name", "gpu", "verdict"), ONLINE)
def test_quantizing_while_loading(engine: str, name: str, gpu: str, verdict: str) -> None:
    served = from_config("model", LLAMA3_8B)
    found = kernels_online(served, Question(gpus[gpu], engine=engine), name)
    quantized = [row for row in found if row.conditions is not None]
    assert quantized
    assert all(row.verdict.startswith(verdict) for row in quantized)
    assert [row.verdict for row in found if row.conditions is None] == ["bf16"]


def test_names_that_make_experts_only() -> None:
    served = from_config("model", DEEPSEEK_V3)
    made = online(served, "vllm", "nvfp4_per_token", gpus["b200"])
    assert {group.matrix.role for group in made.groups if group.linear is not None} == {Role.EXPERT}
    dense = kernels_online(from_config("model", LLAMA3_8B), Question(gpus["b200"]), "nvfp4_per_token")
    assert [row.verdict for row in dense] == ["bf16"]
    hopper = kernels_online(served, Question(gpus["h100"]), "nvfp4_per_token")
    refused = next(row for row in hopper if row.conditions is not None)
    assert refused.path.refusal == "nvfp4_per_token online quantization requires a Blackwell (SM100) GPU."


def test_bytes_of_what_is_made_are_a_files_bytes() -> None:
    """vLLM's fp8_per_channel is the preset fp8_dynamic."""
    made = online(from_config("model", LLAMA3_8B), "vllm", "fp8_per_channel", gpus["h100"])
    written = from_config("model", LLAMA3_8B, preset="fp8_dynamic")
    assert [group.nbytes for group in made.groups] == [group.nbytes for group in written.groups]


def test_layers_that_groups_do_not_divide_stay_wide() -> None:
    made = online(
        from_config("model", LLAMA3_8B | {"intermediate_size": 14344}), "vllm", "mxfp8", gpus["b200"]
    )
    wide = {group.matrix.leaf for group in made.groups if group.linear is None}
    assert wide == {"embed_tokens", "down_proj", "lm_head"}


def test_names_that_make_nothing_are_refused() -> None:
    served = from_config("model", LLAMA3_8B)
    with pytest.raises(UsageError, match="quantizes nothing under this name"):
        kernels_online(served, Question(gpus["h100"]), "compressed-tensors")
    quantized = from_config("model", LLAMA3_8B, preset="fp8_dynamic")
    with pytest.raises(UsageError, match="quantized already"):
        kernels_online(quantized, Question(gpus["h100"]), "fp8_per_tensor")


def test_gpt_oss_as_it_is_published() -> None:
    """Its experts in MXFP4 under its own container: Triton's kernels on Hopper, Marlin's on Ada, wide inputs."""
    shape = geometry(GPT_OSS_20B)
    linear = LinearScheme(schemes["mxfp4"])
    groups = tuple(
        Group(matrix, linear if matrix.role is Role.EXPERT else None, matrix.parameters * 17 // 32)
        for matrix in shape.matrices
    )
    served = Served("gpt-oss-20b", shape, "mxfp4", groups, 0, "config")

    def kernel(gpu: str) -> str:
        found = kernels(served, Question(gpus[gpu]))
        return next(row.path.kernels[0] for row in found if row.conditions is not None)

    assert (kernel("h100"), kernel("l4"), kernel("b200")) == (
        "TRITON", "MARLIN", "FLASHINFER_TRTLLM_MXFP4_BF16",
    )  # fmt: skip
