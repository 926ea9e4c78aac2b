"""The order of kernels in our rows against the engines' own lists, for every GPU; and what a newer wheel changed.

Our names are the classes' (linear layers) or the backends' (experts), shortened by ``engine_sources.short``. The lists
are committed for each version in engine_names.json, which a wheel that is here must equal.
"""

from __future__ import annotations

from typing import Any

import pytest

import engine_sources
from narrowcast.hardware.engines import paths, vllm, vllm_experts, vllm_kernels
from narrowcast.hardware.engines.row import Kernel
from narrowcast.hardware.gpus import GPU, gpus
from narrowcast.hardware.names import VERSIONS
from narrowcast.hardware.names.changes import CHANGES
from narrowcast.tensors.presets import presets

KEPT = engine_sources.snapshot()
OURS = VERSIONS["vllm"][0]
LISTS: dict[str, Any] = KEPT["vllm"][OURS]["lists"]

# Each of our families of linear kernels, and vllm's list that it is a part of.
LINEAR = {
    "FP8": "_POSSIBLE_FP8_KERNELS",
    "FP8_BLOCK": "_POSSIBLE_FP8_BLOCK_KERNELS",
    "FP8_WEIGHT_ONLY": "_POSSIBLE_WFP8A16_KERNELS",
    "INT8": "_POSSIBLE_INT8_KERNELS",
    "MIXED": "_POSSIBLE_KERNELS",
    "W4A8_INT": "_POSSIBLE_KERNELS",
    "W4A8_FP8": "_POSSIBLE_KERNELS",
    "NVFP4": "_POSSIBLE_NVFP4_KERNELS",
    "NVFP4_WEIGHT_ONLY": "_POSSIBLE_NVFP4_KERNELS",
    "MXFP4": "_POSSIBLE_MXFP4_KERNELS",
    "MXFP4_ALWAYS": "_POSSIBLE_MXFP4_KERNELS",
    "MXFP6": "_POSSIBLE_MXFP6_KERNELS",
    "MXFP8": "_POSSIBLE_MXFP8_KERNELS",
}
ELSEWHERE = {
    "MXFP4_FP8": "the list is gone through twice, for FP8 inputs and then for MXFP4 inputs",
    "MXFP4_STATIC_FP8": "Quark's scheme chooses between two by hand",
    "TORCHAO": "torchao chooses for itself",
}
_CONSUMER, _LAST = "consumer cards of AMD", "behind Marlin, which takes every such layer"
_BEHIND = "behind emulation, which takes every such layer"
LEFT_OUT = {
    "CutlassW4A8": "INT4 with FP8 inputs only, a family of its own",
    "RDNA3W4A16": _CONSUMER,
    "RDNAHybridW4A16": _CONSUMER,
    "FlashInferTrtllmMxfp8": _BEHIND,
    "FlashInferTrtllmNvFp4": _LAST,
    "FlashInferCudnnNvFp4": _LAST,
    "FbgemmNvFp4": _LAST,
    "B12xNvFp4": _LAST,
    "B12xNvFp4W4A16": _LAST,
    "TorchNvFp4": _LAST,
    "CPUFP8W8A8": "CPUs with AMX for FP8, told by a note",
    "CPUFp8W8A8Block": "CPUs with AMX for FP8, told by a note",
    "CPUFp8PerTensor": "the CPU build cannot load such weights",
    "ZentorchInt8": "AMD's own CPU build",
    "ZentorchWNA16": "AMD's own CPU build",
    "Dynamic4bit": "Arm's CPUs",
}
# Families that take a part of vllm's list by themselves: the weight-only NVFP4 kernels, and those with these inputs.
PARTS = {"FP8_WEIGHT_ONLY", "W4A8_INT", "W4A8_FP8", "NVFP4_WEIGHT_ONLY"}


def platform(gpu: GPU) -> str | None:
    return {"nvidia": "CUDA", "amd": "ROCM", "cpu": "CPU"}.get(gpu.vendor)


def humming_first(order: list[str], gpu: GPU) -> list[str]:
    """vLLM's prioritize_humming: Humming directly ahead of the first Marlin, on the capabilities that prefer it."""
    humming = next((each for each in order if "humming" in each.lower()), None)
    marlin = next((each for each in order if "marlin" in each.lower()), None)
    if gpu.sm not in LISTS["humming first"] or humming is None or marlin is None:
        return order
    rest = [each for each in order if each != humming]
    return [*rest[: rest.index(marlin)], humming, *rest[rest.index(marlin) :]]


def names(family: tuple[Kernel, ...], gpu: GPU) -> list[str]:
    return list(dict.fromkeys(kernel.name for kernel in family if kernel.reach.holds(gpu)))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_kernels_stand_in_vllms_order(name: str) -> None:
    family: tuple[Kernel, ...] = getattr(vllm_kernels, name)
    lists = LISTS["linear kernels"][LINEAR[name]]
    for gpu in gpus.values():
        order = humming_first(lists.get(platform(gpu), []), gpu)
        ours = names(family, gpu)
        assert ours == [each for each in order if each in ours], (name, gpu.name)


# Kernels of which a row has another platform only.
ELSEWHERE_ONLY = {"CPU": {"PerTensorTorchFP8"}, "ROCM": {"Conch"}}


def test_linear_kernels_are_vllms_but_for_those_left_out() -> None:
    left_out = set()
    for name in LINEAR.keys() - PARTS:
        family: tuple[Kernel, ...] = getattr(vllm_kernels, name)
        for where in ("CUDA", "ROCM", "CPU"):
            boards = [gpu for gpu in gpus.values() if platform(gpu) == where]
            reached = {each for gpu in boards for each in names(family, gpu)}
            missing = set(LISTS["linear kernels"][LINEAR[name]].get(where, [])) - reached
            left_out |= missing - ELSEWHERE_ONLY.get(where, set())
    assert left_out == LEFT_OUT.keys()


def test_every_family_and_every_list_is_compared() -> None:
    families = {
        name
        for name, value in vars(vllm_kernels).items()
        if name.isupper()
        and not name.startswith("_")
        and isinstance(value, tuple)
        and isinstance(value[0], Kernel)
    }
    assert families == LINEAR.keys() | ELSEWHERE.keys()
    assert set(LISTS["linear kernels"]) == set(LINEAR.values())


# Each of our families of experts, vllm's list by NVIDIA and AMD, and the CPU's where it is another.
EXPERTS = {
    "FP8": ("fp8._get_priority_backends", 0, 0),
    "NVFP4": ("nvfp4.select_nvfp4_moe_backend", 0, 0),
    "NVFP4_WEIGHT_ONLY": ("nvfp4.select_nvfp4_moe_backend", 0, 0),
    "GPT_OSS": ("mxfp4._get_priority_backends_for_gpt_oss", 0, 0),
    "MXFP4": ("mxfp4._get_priority_backends", 0, 1),
    "MXFP8": ("mxfp8._SUPPORTED_BACKENDS", 0, 0),
    "INT8": ("int8._get_priority_backends", 0, 0),
    "MIXED": ("int_wna16._get_priority_backends", 0, 0),
    "W4A8_FP8": ("w4a8.select_w4a8_moe_backend", 0, 0),
}
EXPERTS_LEFT_OUT = {
    "BATCHED_DEEPGEMM": "batches per expert",
    "BATCHED_VLLM_CUTLASS": "batches per expert",
    "BATCHED_TRITON": "batches per expert",
    "BATCHED_MARLIN": "batches per expert",
    "FLASHINFER_CUTEDSL_BATCHED": "batches per expert",
    "XPU": "Intel GPUs",
    "RDNA3": "consumer cards of AMD",
    "ZEN_CPU": "AMD's own CPU build",
    "CPU_W8A8": "CPUs with AMX for FP8",
    "HPC": "behind Marlin, which takes every such layer",
    "EMULATION": "behind kernels that take every such layer",
    "FLASHINFER_TRTLLM_MXFP4_MXFP8": "gpt-oss on request; the other family has it",
    "FLASHINFER_CUTLASS_MXFP4_MXFP8": "on request",
    "CUTLASS_MXFP4_MXFP4": "on request",
    "AITER_TRITON_MXFP4_BF16": "behind aiter's own",
    "AITER_MXFP4_FP8": "on request",
    "AITER_MXFP4_MXFP4": "on request",
}
# What the functions do to their lists, in the source's words; experts() below does the same.
OVERRIDES = {
    "fp8": {
        "current_platform.is_cpu()": "CPU_W8A8",
        "current_platform.is_xpu()": "XPU",
        "moe_config.moe_parallel_config.ep_size > 1": "FLASHINFER_CUTLASS",
        "else": "TRITON",
    },
    "mxfp4": {"current_platform.is_cuda() and current_platform.is_device_capability_family(120)": "TRITON"},
}


def experts(name: str, gpu: GPU, block: bool) -> list[str]:
    """vLLM's order of experts' backends without expert parallelism."""
    key, nvidia, amd = EXPERTS[name]
    lists = LISTS["expert kernels"][key]
    if name == "MIXED" and gpu.vendor == "cpu":
        return list(lists[1])
    order = humming_first(list(lists[amd if gpu.vendor == "amd" else nvidia]), gpu)
    if name == "FP8" and gpu.sm == 90 and block:
        order = ["TRITON", *(each for each in order if each != "TRITON")]
    if name == "FP8" and gpu.vendor == "cpu":
        order = ["CPU_W8A8", "CPU", *(each for each in order if not each.startswith("CPU"))]
    if name == "GPT_OSS" and gpu.sm is not None and gpu.sm // 10 == 12:
        order.remove("TRITON")
        order.insert(order.index("BATCHED_MARLIN") + 1, "TRITON")
    return order


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_stand_in_vllms_order(name: str) -> None:
    family: tuple[Kernel, ...] = getattr(vllm_experts, name)
    for preset in ("fp8_block", "fp8_dynamic") if name == "FP8" else (None,):
        for gpu in gpus.values():
            fitting = family
            if preset is not None:
                fitting = tuple(kernel for kernel in family if kernel.fits(presets[preset].linear))
            order = experts(name, gpu, preset == "fp8_block")
            ours = names(fitting, gpu)
            assert ours == [each for each in order if each in ours], (name, preset, gpu.name)


def test_experts_are_vllms_but_for_those_left_out() -> None:
    left_out = set()
    for name in EXPERTS.keys() - {"NVFP4_WEIGHT_ONLY"}:  # a part of NVFP4
        members = {each for order in LISTS["expert kernels"][EXPERTS[name][0]] for each in order}
        left_out |= members - {kernel.name for kernel in getattr(vllm_experts, name)}
    assert left_out == EXPERTS_LEFT_OUT.keys()


def test_every_oracle_is_compared() -> None:
    families = {name for name in vars(vllm_experts) if name.isupper() and not name.startswith("_")}
    families -= {"AITER", "HUMMING", "MARLIN_GROUPS", "SM10X", "SM12X", "CDNA3", "CDNA4", "CPU", "ROCM"}
    families -= {"EMULATED", "WEIGHT_ONLY", "UNKNOWN"}
    families -= {"CT_MXFP4"}  # its method chooses by hand between CUTLASS and Marlin
    assert families == EXPERTS.keys()
    others = {"unquantized._get_priority_backends", "fp8.select_fp8_moe_backend"}
    others.add("mxfp4.select_deepseek_v4_mxfp4_moe_backend")
    assert set(LISTS["expert kernels"]) == {key for key, _, _ in EXPERTS.values()} | others


def test_humming_is_brought_forward_everywhere() -> None:
    """INT8 and W4A8 have no Marlin to be brought before."""
    assert set(LISTS["humming ranked"]) == {
        "linear/__init__._resolve_backend_kernels",
        "oracle/fp8._get_priority_backends",
        "oracle/int_wna16._get_priority_backends",
        "oracle/mxfp4._get_priority_backends",
        "oracle/mxfp4._get_priority_backends_for_gpt_oss",
        "oracle/mxfp8.select_mxfp8_moe_backend",
        "oracle/nvfp4.select_nvfp4_moe_backend",
    }


def test_overrides_are_those_that_the_rows_follow() -> None:
    for oracle, expected in OVERRIDES.items():
        found = {
            test: call
            for key, branches in LISTS["expert overrides"].items()
            for test, call in branches
            if key.startswith(f"{oracle}.") and "deepep_v2" not in test  # another way of spreading experts
        }
        assert found.keys() == expected.keys()
        for test, backend in expected.items():
            assert backend in found[test], test


# ---- newer versions


def flat(lists: dict[str, Any]) -> dict[str, list[str]]:
    """The lists whose order or membership decides something, by the place that a Change names."""
    flat_lists = {
        f"{name} {platform}": order
        for name, by in lists["linear kernels"].items()
        for platform, order in by.items()
    }
    flat_lists |= {
        f"{key} {n}": each for key, orders in lists["expert kernels"].items() for n, each in enumerate(orders)
    }
    for key in ("backend kernels", "kv backends", "expert overrides"):
        for name, order in lists[key].items():
            flat_lists[f"{key} {name}"] = [
                " → ".join(each) if isinstance(each, list) else each for each in order
            ]
    for key in ("humming first", "humming ranked"):
        flat_lists[key] = [str(each) for each in lists[key]]
    return flat_lists


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """What came and what went, by list; a list whose common members moved has them on both sides."""
    found = {}
    before, after = flat(old), flat(new)
    named = {
        f"kv backends {name}" for name in set(new["kv"]) - set(old["kv"])
    }  # new names have rows of their own
    for where in sorted((before.keys() | after.keys()) - named):
        was, now = before.get(where, []), after.get(where, [])
        added = tuple(each for each in now if each not in was)
        removed = tuple(each for each in was if each not in now)
        if [each for each in was if each in now] != [each for each in now if each in was]:
            added, removed = tuple(now), tuple(was)
        if added or removed:
            found[where] = (added, removed)
    return found


@pytest.mark.parametrize("version", VERSIONS["vllm"][1:])
def test_changes_of_newer_versions_are_known(version: str) -> None:
    told = {
        change.where: (change.added, change.removed)
        for change in CHANGES
        if (change.engine, change.version) == ("vllm", version)
    }
    assert changes(LISTS, KEPT["vllm"][version]["lists"]) == told


def test_wheels_that_are_not_committed_changed_nothing() -> None:
    """A newer wheel whose kernels moved fails here: write the snapshot, list the changes, say since when names are."""
    newer = [
        (version, package)
        for (engine, version), package in engine_sources.wheels().items()
        if engine == "vllm" and version not in KEPT["vllm"]
    ]
    last = KEPT["vllm"][VERSIONS["vllm"][-1]]["lists"]
    for version, package in newer:
        assert changes(last, engine_sources.vllm(package)) == {}, version


# ---- SGLang


CHAINS = KEPT["sglang"][VERSIONS["sglang"][-1]]["lists"]["chains"]
# The automatic choice for FP8 blocks, in the source's order, and our names; None is not among our GPUs.
BLOCKS = (
    ("deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM", "deepgemm_w8a8_block_fp8_linear_with_fallback", "deep_gemm"),
    (
        "get_platform().is_blackwell and is_flashinfer_available()",
        "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
        "flashinfer_trtllm",
    ),
    ("get_platform().is_sm120", "cutlass_w8a8_block_fp8_linear_with_fallback", "cutlass"),
    ("_use_aiter", "aiter_w8a8_block_fp8_linear", "aiter"),
    (
        "is_npu_arch35() and (act_scale_ue8m0 or envs.SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8.get())",
        "npu_w8a8_mxfp8_linear",
        None,
    ),
    ("_is_xpu", "torch_w8a8_block_fp8_linear", None),
    ("else", "triton_w8a8_block_fp8_linear", "triton"),
)


def test_sglangs_chain_of_fp8_blocks() -> None:
    assert CHAINS["fp8 blocks"] == [[test, f"return {call}"] for test, call, _ in BLOCKS]
    assert CHAINS["fp8 start"] == [
        ["backend == 'auto' and get_platform().is_sm120", "backend = 'cutlass'"],
        ["backend == 'auto' and get_platform().is_sm110", "backend = 'triton'"],
    ]
    order = [name for _, _, name in BLOCKS if name is not None]
    for gpu in gpus.values():
        path = paths("sglang", "fp8", presets["fp8_block"].linear, gpu)
        # below 8.9 the linear method turns to Marlin before it asks for a block kernel
        ours = [name for name in path.kernels if name != "fp8_marlin"]
        assert ours == [name for name in order if name in ours], gpu.name
        if gpu.sm is not None and gpu.sm // 10 == 12:
            assert path.kernels[0] == "cutlass"


def test_sglangs_choice_for_nvfp4() -> None:
    assert CHAINS["fp4 start"] == [
        ["get_platform().is_sm100", "backend = 'flashinfer_cutedsl'"],
        ["is_cuda() and (10, 0) > get_device_capability() >= (8, 0)", "backend = 'marlin'"],
        ["else", "backend = 'flashinfer_cutlass'"],
    ]
    for gpu in gpus.values():
        if gpu.capability is None or gpu.capability < (8, 0):
            continue
        wanted = "flashinfer_cutlass"
        if gpu.capability[0] == 10:
            wanted = "flashinfer_cutedsl"
        elif gpu.capability < (10, 0):
            wanted = "fp4_marlin"
        assert paths("sglang", "modelopt", presets["nvfp4"].linear, gpu).kernels[0] == wanted, gpu.name


def test_rows_are_of_the_first_version() -> None:
    assert vllm.ENGINE.version == OURS
