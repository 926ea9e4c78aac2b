"""What runs where: typed from the engines' documented behaviour, one line for each question that people ask.

(engine, container, preset, GPU) → the first kernel and the arithmetic, or a piece of the refusal.
"""

from __future__ import annotations

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import ENGINES, engines, paths, readers
from narrowcast.hardware.gpus import gpus
from narrowcast.numbers.formats import INT4, UINT4, formats
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes
from narrowcast.tensors.storage import stored_scheme

CT, WEIGHT_ONLY, EMULATED = "compressed-tensors", "bf16: weight only", "bf16: emulated"

RUNS = [
    # FP8 W8A8: real from Ada on, Marlin's weight-only kernel before, FNUZ on MI300
    ("vllm", CT, "fp8_dynamic", "l4", "CutlassFP8", "fp8"),
    ("vllm", CT, "fp8_dynamic", "h100", "CutlassFP8", "fp8"),
    ("vllm", CT, "fp8_dynamic", "a100", "MarlinFP8", WEIGHT_ONLY),
    ("vllm", CT, "fp8_dynamic", "t4", "MarlinFP8", WEIGHT_ONLY),
    ("vllm", CT, "fp8_dynamic", "mi300x", "RowWiseTorchFP8", "fp8"),
    ("vllm", CT, "fp8", "b200", "FlashInferFP8", "fp8"),
    ("vllm", CT, "fp8", "h100", "CutlassFP8", "fp8"),
    ("vllm", CT, "fp8", "mi300x", "ROCmFP8", "fp8"),
    ("vllm", "fp8", "fp8_per_tensor", "a100", "MarlinFP8", WEIGHT_ONLY),
    ("vllm", "modelopt", "fp8", "rtx 3090", "MarlinFP8", WEIGHT_ONLY),
    # blocks: CUTLASS has them from 9.0 on, and Marlin stands before Triton in the list
    ("vllm", "fp8", "fp8_block", "h100", "FlashInferFp8DeepGEMMDynamicBlockScaled", "fp8"),
    ("vllm", "fp8", "fp8_block", "b200", "DeepGemmFp8Block", "fp8"),
    ("vllm", "fp8", "fp8_block", "l40s", "MarlinFP8", WEIGHT_ONLY),
    ("vllm", "fp8", "fp8_block", "mi325x", "TritonFp8Block", "fp8"),
    ("vllm", "fp8", "fp8_block", "cpu", "CPUFp8Block", WEIGHT_ONLY),
    # INT8
    ("vllm", CT, "int8", "a100", "CutlassInt8", "int8"),
    ("vllm", CT, "int8", "h100", "CutlassInt8", "int8"),
    ("vllm", CT, "int8", "mi300x", "TritonInt8", "int8"),
    ("vllm", CT, "int8", "cpu", "CPUInt8", "int8"),
    # weight-only integers: Machete is Hopper's
    ("vllm", CT, "w4a16", "h100", "Machete", WEIGHT_ONLY),
    ("vllm", CT, "w4a16", "a100", "Marlin", WEIGHT_ONLY),
    ("vllm", "gptq", "w4a16", "rtx 4090", "Marlin", WEIGHT_ONLY),
    ("vllm", "awq", "w4a16_asym", "b200", "Marlin", WEIGHT_ONLY),
    ("vllm", CT, "w4a16", "mi300x", "TritonW4A16", WEIGHT_ONLY),
    ("vllm", CT, "w4a16", "cpu", "CPUWNA16", WEIGHT_ONLY),
    ("vllm", CT, "w4afp8", "h100", "CutlassW4A8", "fp8"),
    # NVFP4: Blackwell computes in it, the others decode, ROCm emulates
    ("vllm", CT, "nvfp4", "b200", "FlashInferCuteDslNvFp4", "nvfp4"),
    ("vllm", CT, "nvfp4", "rtx 5090", "FlashInferCutlassNvFp4", "nvfp4"),
    ("vllm", "modelopt", "nvfp4", "h100", "MarlinNvFp4", WEIGHT_ONLY),
    ("vllm", CT, "nvfp4", "a100", "MarlinNvFp4", WEIGHT_ONLY),
    ("vllm", CT, "nvfp4", "mi355x", "EmulationNvFp4", EMULATED),
    ("vllm", CT, "nvfp4a16", "b200", "FlashInferCuteDslNvFp4W4A16", WEIGHT_ONLY),
    ("vllm", CT, "nvfp4a16", "rtx 5090", "MarlinNvFp4", WEIGHT_ONLY),
    # MX
    ("vllm", CT, "mxfp4", "b200", "FlashInferMxFp4", "mxfp4"),
    ("vllm", CT, "mxfp4", "h100", "MarlinMxFp4", WEIGHT_ONLY),
    ("vllm", CT, "mxfp4xfp8", "h100", "MarlinMxFp4", WEIGHT_ONLY),
    ("vllm", CT, "mxfp4xfp8", "b200", "FlashInferMxFp4", "mxfp4"),
    ("vllm", "quark", "mxfp4", "mi355x", "AiterMxfp4", "mxfp4"),
    ("vllm", "quark", "mxfp4", "mi300x", "EmulationMxfp4", EMULATED),
    ("vllm", CT, "mxfp8", "b200", "FlashInferCutedslMxfp8", "mxfp8"),
    ("vllm", CT, "mxfp8", "l4", "MarlinMxfp8", WEIGHT_ONLY),
    ("vllm", CT, "mxfp8", "mi355x", "RocmDotScaledMxfp8", "mxfp8"),
    ("vllm", "mxfp4", "mxfp4a16", "a100", "MARLIN", WEIGHT_ONLY),
    ("vllm", "mxfp4", "mxfp4a16", "h100", "TRITON", WEIGHT_ONLY),
    # SGLang
    ("sglang", CT, "fp8_dynamic", "l4", "fp8_scaled_mm", "fp8"),
    ("sglang", CT, "fp8_dynamic", "a100", "fp8_marlin", WEIGHT_ONLY),
    ("sglang", "fp8", "fp8_block", "rtx 5090", "cutlass", "fp8"),
    ("sglang", "fp8", "fp8_block", "l4", "triton", "fp8"),
    ("sglang", CT, "nvfp4", "h100", "fp4_marlin", WEIGHT_ONLY),
    ("sglang", "modelopt", "nvfp4", "b200", "flashinfer_cutedsl", "nvfp4"),
    ("sglang", CT, "int8", "a100", "int8_scaled_mm", "int8"),
    ("sglang", "mxfp4", "mxfp4a16", "b200", "flashinfer_mxfp4", "mxfp8"),
    # TensorRT-LLM
    ("tensorrt-llm", "modelopt", "nvfp4", "b200", "NVFP4", "nvfp4"),
    ("tensorrt-llm", "modelopt", "w4a16", "a100", "W4A16_AWQ", WEIGHT_ONLY),
    ("tensorrt-llm", CT, "fp8_dynamic", "h100", "FP8_PER_CHANNEL_PER_TOKEN", "fp8"),
    ("tensorrt-llm", "mxfp4", "mxfp4a16", "h100", "W4A16_MXFP4", WEIGHT_ONLY),
    # transformers
    ("transformers", CT, "nvfp4", "b200", "compressed-tensors", "bf16: dequantized"),
    ("transformers", "fp8", "fp8_block", "l4", "finegrained-fp8", "fp8"),
    ("transformers", "fp8", "fp8_block", "a100", "finegrained-fp8", "bf16: dequantized"),
    ("transformers", "mxfp4", "mxfp4a16", "t4", "triton_kernels", WEIGHT_ONLY),
    ("transformers", "mxfp4", "mxfp4a16", "v100", "dequantized", "bf16: dequantized"),
]

REFUSED = [
    ("vllm", CT, "int8", "b200", "Int8 not supported on SM100"),
    ("vllm", CT, "int8", "rtx 5090", "Int8 not supported on SM100"),
    ("vllm", CT, "w4afp8", "b200", "9.0 only"),
    ("vllm", CT, "mxfp6a16", "h100", "No compressed-tensors compatible scheme"),
    ("vllm", CT, "nvfp4a16", "mi300x", "Marlin FP4 not available"),
    ("vllm", CT, "fp8_dynamic", "v100", "not supported on v100"),
    ("vllm", "gptq", "w4a16", "v100", "not supported on v100"),
    ("vllm", "awq", "w4a16_asym", "v100", "not supported on v100"),
    ("vllm", CT, "mxfp4", "t4", "not supported on t4"),
    ("vllm", CT, "fp8_dynamic", "mi250x", "no kernel on mi250x"),
    ("vllm", CT, "fp8_per_tensor", "cpu", "static_scaled_fp8_quant"),
    ("vllm", CT, "w8a16", "cpu", "no kernel on cpu"),
    ("vllm", "quark", "fp8_dynamic", "a100", "Min capability: 89"),
    ("vllm", "gptq", "w4a16_asym", "h100", "Unsupported quantization config"),
    ("vllm", "modelopt", "w4a16", "h100", "ModelOpt currently only supports"),
    ("vllm", "auto-round", "nvfp4", "b200", "nv_fp"),
    ("vllm", "auto-round", "fp8_dynamic", "h100", "2-D group_size"),
    ("vllm", "gguf", "w4a16", "h100", "gguf is not among"),
    ("vllm", "bitsandbytes", "w4a16", "h100", "bitsandbytes is not among"),
    ("vllm", CT, "fp8_dynamic", "gaudi3", "no kernels known here"),
    ("sglang", CT, "int8", "t4", "int8_scaled_mm"),
    ("sglang", CT, "int8", "b200", "int8_scaled_mm"),
    ("sglang", CT, "w4a8", "h100", "not for dense layers"),
    ("sglang", CT, "mxfp4", "b200", "NVFP4 layout"),
    ("sglang", "modelopt", "fp8", "a100", "8.9"),
    ("sglang", "modelopt", "fp8_dynamic", "h100", "algorithms"),
    ("tensorrt-llm", CT, "fp8_per_tensor", "h100", "FP8 per tensor is refused"),
    ("tensorrt-llm", CT, "w4a16", "h100", "raises a ValueError"),
    ("tensorrt-llm", CT, "int8", "a100", "raises a ValueError"),
    ("tensorrt-llm", "modelopt", "nvfp4", "h100", "no kernel on h100"),
    ("tensorrt-llm", "gptq", "w4a16", "a100", "gptq is not read"),
    ("transformers", "modelopt", "nvfp4", "b200", "Unknown quantization type"),
]


@pytest.mark.parametrize(("engine", "container", "preset", "gpu", "kernel", "arithmetic"), RUNS)
def test_runs(engine: str, container: str, preset: str, gpu: str, kernel: str, arithmetic: str) -> None:
    path = paths(engine, container, presets[preset].linear, gpus[gpu])
    assert path.refusal is None
    assert (path.kernels[0], path.arithmetic) == (kernel, arithmetic)
    assert path.low_precision is not arithmetic.startswith("bf16")
    assert path.weight_only is (arithmetic in (WEIGHT_ONLY, "bf16: dequantized"))


@pytest.mark.parametrize(("engine", "container", "preset", "gpu", "reason"), REFUSED)
def test_refused(engine: str, container: str, preset: str, gpu: str, reason: str) -> None:
    path = paths(engine, container, presets[preset].linear, gpus[gpu])
    assert path.refusal is not None
    assert reason in path.refusal
    assert path.remedy
    assert not path.kernels
    assert not path.low_precision


def test_any_gpu_says_from_where() -> None:
    """Without a GPU the answer is the best of all, with the capability from which it runs and is real."""
    path = paths("vllm", CT, presets["fp8_dynamic"].linear)
    assert (path.kernels[0], path.arithmetic) == ("CutlassFP8", "fp8")
    assert "runs on NVIDIA from compute capability 7.5, cpu, gfx942, gfx950" in path.notes
    assert "computes in fp8 on NVIDIA from compute capability 8.9, gfx942, gfx950" in path.notes
    assert "runs on NVIDIA of compute capability 9.0" in paths("vllm", CT, presets["w4afp8"].linear).notes
    assert any("7.5 to 9.0" in note for note in paths("vllm", CT, presets["int8"].linear).notes)
    # On AMD it takes an optional package, which "any GPU" does not count where others need none.
    assert paths("vllm", CT, presets["mxfp4"].linear).notes[0] == "runs on NVIDIA from compute capability 8.0"
    assert paths("sglang", "quark", presets["mxfp4"].linear).package == "aiter"
    nvfp4 = paths("sglang", CT, presets["nvfp4"].linear)
    assert nvfp4.notes == (
        "runs on NVIDIA from compute capability 8.0", "computes in nvfp4 on NVIDIA from compute capability 10.0",
    )  # fmt: skip


def test_notes_tell_what_is_surprising() -> None:
    def notes(container: str, preset: str, gpu: str) -> str:
        return " ".join(paths("vllm", container, presets[preset].linear, gpus[gpu]).notes)

    assert "E4M3FNUZ" in notes(CT, "fp8_dynamic", "mi300x")
    assert "E4M3FNUZ" not in notes(CT, "fp8_dynamic", "mi355x")
    assert "the inputs stay wide" in notes(CT, "fp8_dynamic", "a100")
    assert "the inputs stay wide" in notes(CT, "w4a8", "h100")
    assert "the engine quantizes the inputs" in notes(CT, "mxfp4a16", "b200")
    assert "the engine quantizes the inputs" not in notes("quark", "mxfp4a16", "b200")
    assert "0.15 POPS" in notes(CT, "int8", "b300")
    assert "0.15 POPS" not in notes(CT, "int8", "b200")
    assert "MXFP4 inputs are asked for instead" in notes(CT, "mxfp4xfp8", "h100")


def test_shapes_and_groups_choose_the_kernel() -> None:
    """CUTLASS W4A8 takes groups and multiples of 128, DeepGEMM multiples of 64 and 128, Marlin no group of 16."""
    h100, w4afp8 = gpus["h100"], presets["w4afp8"]
    assert paths("vllm", CT, w4afp8.linear, h100, shape=(4096, 4096)).kernels == ("CutlassW4A8",)
    assert paths("vllm", CT, w4afp8.linear, h100, shape=(4160, 4096)).package == "humming"
    assert paths("vllm", CT, w4afp8.with_group(64).linear, h100).package == "humming"
    block = presets["fp8_block"].linear
    assert paths("vllm", "fp8", block, gpus["b200"], shape=(4096, 4096)).kernels[0] == "DeepGemmFp8Block"
    assert paths("vllm", "fp8", block, gpus["b200"], shape=(4000, 4096)).kernels[0] == "CutlassFp8Block"
    w4a16 = presets["w4a16"].linear
    assert paths("vllm", CT, w4a16, h100, shape=(4096, 4096)).kernels[0] == "Machete"
    assert paths("vllm", CT, w4a16, h100, shape=(4160, 4096)).kernels[0] == "Marlin"
    sixteen = LinearScheme(stored_scheme(INT4, (1, 16), formats["fp16"]))
    refused = paths("vllm", "gptq", sixteen, gpus["a100"])
    assert refused.refusal is not None
    assert "group_sizes = [-1, 32, 64, 128]" in refused.refusal
    assert paths("vllm", "gptq", w4a16, gpus["a100"]).kernels[0] == "Marlin"


CUT = [
    # GPTQ takes any K; Marlin asks that groups divide it, and takes a group wider than K for one that is as wide
    ("gptq", "w4a16", (160, 192), ("transformers",)),
    ("gptq", "w4a16", (160, 64), ("vllm", "sglang", "transformers")),
    ("gptq", "w4a16", (160, 256), ("vllm", "sglang", "transformers")),
    ("auto-round", "w4a16", (160, 192), ("transformers",)),
    (CT, "w4a16", (160, 192), ("transformers",)),
    (CT, "w4afp8", (4096, 4160), ("transformers",)),
    # transformers would take 160 rows under two scales for two blocks of 80
    ("fp8", "fp8_block", (160, 128), ("vllm", "sglang", "tensorrt-llm")),
    ("fp8", "fp8_block", (96, 128), ("vllm", "sglang", "tensorrt-llm", "transformers")),
    (CT, "fp8_block", (160, 128), ("vllm", "sglang", "tensorrt-llm", "transformers")),
]  # fmt: skip


@pytest.mark.parametrize(("container", "preset", "shape", "who"), CUT)
def test_tiles_that_an_edge_cuts(
    container: str, preset: str, shape: tuple[int, int], who: tuple[str, ...]
) -> None:
    assert readers(container, presets[preset].linear, shape=shape) == who


V, S, T, H = ENGINES

# Which loaders have a branch for it, by the engines' sources; a few have it for one container and not for another.
READ = [
    (CT, "fp8_dynamic", (V, S, T, H)),
    (CT, "fp8_per_tensor", (V, S, H)),
    (CT, "nvfp4", (V, S, T, H)),
    (CT, "mxfp4a16", (V, T, H)),
    (CT, "mxfp8", (V, H)),
    (CT, "mxfp6a16", (H,)),
    # dense layers; SGLang has packed INT4 with 8-bit inputs for routed experts
    (CT, "w4a8", (V, H)),
    ("fp8", "fp8_block", (V, S, T, H)),
    ("fp8", "fp8_per_tensor", (V, S)),
    # groups of 32 need quant_method mxfp8
    ("fp8", "mxfp8", (H,)),
    ("modelopt", "mxfp8", (V, S, T)),
    ("modelopt", "nvfp4a16", (V, S, T)),
    ("modelopt", "mxfp4", ()),
    ("modelopt", "w4a16", (T,)),
    ("quark", "fp8_dynamic", (V, S, H)),
    ("quark", "mxfp4", (V, S, H)),
    ("quark", "mxfp6a8", (V, H)),
    ("quark", "nvfp4a16", (H,)),
    ("gptq", "w4a16", (V, S, H)),
    ("gptq", "w4a16_asym", (H,)),
    ("auto-round", "w4a16_asym", (V, S, H)),
    ("auto-round", "fp8_block", (V, H)),
    ("auto-round", "nvfp4a16", (H,)),
    ("mxfp4", "mxfp4a16", (V, S, T, H)),
]


@pytest.mark.parametrize(("container", "preset", "who"), READ)
def test_who_loads(container: str, preset: str, who: tuple[str, ...]) -> None:
    assert readers(container, presets[preset].linear) == who


def test_words_of_the_container_decide() -> None:
    """GPTQ's order of columns, bits that only one engine has, AWQ's gemv, ModelOpt's NVFP4_AWQ."""
    int4 = LinearScheme(schemes["int4_g128"])
    ordered = {engine: paths(engine, "gptq", int4, format="gptq desc_act").refusal for engine in engines}
    assert "desc_act" in str(ordered["vllm"])
    assert ordered["sglang"] is None
    assert ordered["transformers"] is None
    three = LinearScheme(stored_scheme(formats["int3"], (1, 128), formats["fp16"]))
    readers = {engine: paths(engine, "gptq", three).refusal is None for engine in engines}
    assert readers == {"vllm": False, "sglang": False, "tensorrt-llm": False, "transformers": True}
    # compressed-tensors holds any width, which in vLLM only an optional package computes
    assert paths("vllm", CT, three, gpus["h100"]).package == "humming"
    uint4 = LinearScheme(stored_scheme(UINT4, (1, 128), formats["fp16"], zero=UINT4))
    assert paths("vllm", "awq", uint4, format="gemm").refusal is None
    assert paths("vllm", "awq", uint4, format="gemv").refusal is not None
    nvfp4 = presets["nvfp4"].linear
    assert paths("vllm", "modelopt", nvfp4, format="NVFP4_AWQ").refusal is not None
    assert paths("tensorrt-llm", "modelopt", nvfp4, format="NVFP4_AWQ").refusal is None
    assert paths("vllm", "auto-round", int4, format="auto_round").refusal is not None


def test_blocks_of_another_size() -> None:
    """TensorRT-LLM takes 128x128 alone; vLLM's choice on NVIDIA has no kernel for other groups, Triton on AMD has."""
    inputs = stored_scheme(formats["e4m3fn"], (1, 64), formats["fp32"])
    linear = LinearScheme(stored_scheme(formats["e4m3fn"], (64, 64), formats["fp32"]), inputs)
    assert "(128,128)" in str(paths("tensorrt-llm", "fp8", linear).refusal)
    assert "Marlin" in str(paths("vllm", "fp8", linear, gpus["h100"]).refusal)
    assert paths("vllm", "fp8", linear, gpus["mi300x"]).kernels == ("TritonFp8Block",)
    assert paths("sglang", "fp8", linear, gpus["h100"]).kernels == ("triton",)


def test_experts_have_kernels_of_their_own() -> None:
    def first(engine: str, preset: str, gpu: str) -> str:
        return paths(engine, CT, presets[preset].linear, gpus[gpu], experts=True).kernels[0]

    assert first("vllm", "nvfp4", "b200") == "FLASHINFER_TRTLLM"
    assert first("vllm", "nvfp4", "h100") == "MARLIN"
    assert first("vllm", "fp8_block", "h100") == "TRITON"
    assert first("vllm", "fp8_dynamic", "h100") == "VLLM_CUTLASS"
    assert first("vllm", "fp8_dynamic", "a100") == "MARLIN"
    assert first("vllm", "int8", "b200") == "TRITON"
    # no list of backends is asked for these (vllm-project/vllm#55232, #31085)
    assert first("vllm", "mxfp4", "b300") == first("vllm", "mxfp4a16", "b200") == "CUTLASS_MXFP4_MXFP4"
    assert first("vllm", "mxfp4", "rtx pro 6000") == first("vllm", "mxfp4a16", "h100") == "MARLIN"
    # SGLang reads packed INT4 with 8-bit inputs for routed experts alone
    assert first("sglang", "w4afp8", "h100") == "cutlass_w4a8"


def test_read_only_containers() -> None:
    nf4 = LinearScheme(schemes["nf4_b64"])
    readers = {engine: paths(engine, "bitsandbytes", nf4).refusal is None for engine in engines}
    assert readers == {"vllm": False, "sglang": True, "tensorrt-llm": False, "transformers": True}
    row = presets["fp8_dynamic"].linear
    assert "deprecated" in str(paths("vllm", "fbgemm-fp8", row).refusal)
    assert paths("transformers", "fbgemm-fp8", row, gpus["h100"]).low_precision
    assert paths("transformers", "fbgemm-fp8", row, gpus["l4"]).refusal is not None
    assert paths("vllm", "torchao", row, gpus["a100"]).refusal is not None
    assert paths("vllm", "torchao", row, gpus["l4"]).refusal is None
    assert paths("vllm", "torchao", LinearScheme(schemes["int4_g128"]), gpus["a100"]).refusal is None


def test_unknown_engine() -> None:
    assert list(engines) == list(ENGINES) == [row.name for row in engines.values()]
    assert readers("plain", None) == tuple(ENGINES)
    with pytest.raises(UsageError, match="unknown engine"):
        paths("vlm", CT, presets["fp8"].linear)
    assert {name: row.version for name, row in engines.items() if name != "tensorrt-llm"} == {
        "vllm": "0.32.0", "sglang": "0.5.23", "transformers": "5.24.0",
    }  # fmt: skip
