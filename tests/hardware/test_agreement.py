"""The rows against everything else that knows: the containers' own lists, vLLM's source, and runs of its CPU build."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.hardware.engines import engines, paths, vllm_kernels
from narrowcast.hardware.engines.row import Kernel
from narrowcast.hardware.gpus import gpus
from narrowcast.numbers.formats import BF16
from narrowcast.tensors.presets import presets

ROOT = Path(__file__).parents[2]
CT = "compressed-tensors"

# Where a container's list and the rows differ, and what the engine's source says. True: the engine reads it.
_QUARK_ALL = (
    "fp8_dynamic", "fp8_per_tensor", "fp8_block", "fp8", "w4a16", "w4a16_asym", "w4afp8", "nvfp4", "nvfp4a16", "mxfp4",
    "mxfp4a16", "mxfp4xfp8", "mxfp6a16", "mxfp6a8", "mxfp8", "mxfp8a16",
)  # fmt: skip
DIFFERS: dict[tuple[str, str], dict[str, bool]] = {
    # No class for MXFP6 in compressed_tensors.py; Quark's has Humming for MXFP8 inputs.
    ("vllm", CT): {"mxfp6a16": False, "mxfp6a8": False},
    ("vllm", "quark"): {"mxfp6a8": True},
    # Groups of 32 need quant_method mxfp8 in SGLang, and have no FP8 kernel in vLLM.
    ("vllm", "fp8"): {"mxfp8": False},
    ("sglang", "fp8"): {"mxfp8": False},
    # compressed_tensors.py has W4A8 for routed experts alone.
    ("sglang", CT): {"w4a8": False, "w4afp8": False},
    # model_config.py and modelopt_quant.py; quark.py; auto_round.py.
    ("sglang", "modelopt"): {"nvfp4a16": True, "mxfp8": True},
    ("sglang", "quark"): dict.fromkeys(("fp8_dynamic", "fp8_per_tensor", "fp8_block", "fp8", "mxfp4"), True),
    ("sglang", "auto-round"): {"w8a16": True, "w4a16": True, "w4a16_asym": True},
    # model_config.py of TensorRT-LLM reads these Hugging Face formats.
    ("tensorrt-llm", CT): dict.fromkeys(("fp8_dynamic", "fp8_block", "nvfp4", "mxfp4a16"), True),
    ("tensorrt-llm", "fp8"): {"fp8_block": True, "fp8_block_ue8m0": True},
    ("tensorrt-llm", "mxfp4"): {"mxfp4a16": True},
    # quantizer_quark.py, through amd-quark.
    ("transformers", "quark"): dict.fromkeys(_QUARK_ALL, True),
}


def spelled() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Container, preset, the container's word and the engines that it says read it."""
    for container in containers.values():
        if container.spelling is None:
            continue
        for preset in presets.values():
            try:
                how = container.spelling(preset.linear, BF16)
            except UsageError:
                continue
            yield container.name, preset.name, how.format, how.engines


@pytest.mark.parametrize("engine", list(engines))
def test_containers_say_the_same(engine: str) -> None:
    """Readable by the container's list ⇔ some GPU has a path, but for the differences above."""
    seen = 0
    for container, preset, word, readers in spelled():
        reads = paths(engine, container, presets[preset].linear, format=word).refusal is None
        said = DIFFERS.get((engine, container), {}).get(preset, engine in readers)
        assert reads is said, (engine, container, preset)
        seen += 1
    assert seen > 60


def test_differences_are_still_there() -> None:
    """A difference that a container's list no longer has must leave the table above."""
    lists = {(container, preset): readers for container, preset, _, readers in spelled()}
    stale = [
        (engine, container, preset)
        for (engine, container), found in DIFFERS.items()
        for preset, reads in found.items()
        if (engine in lists[container, preset]) is reads
    ]
    assert not stale


def test_cpu_rows_agree_with_runs() -> None:
    """What vLLM's CPU build did with a file of each kind is what the rows say of the CPU.

    A layer of 576 rows is refused in blocks of 128 for its shape, which tests of tensor parallelism cover.
    """
    files = json.loads((ROOT / "engines" / "results.json").read_text())["avx512_bf16"]["files"]
    words = {(container, preset): word for container, preset, word, _ in spelled()}
    tried = 0
    for name, run in files.items():
        container, preset = name.split("/")
        if "is not divisible by weight quantization block" in run.get("message", ""):
            continue
        path = paths("vllm", container, presets[preset].linear, gpus["cpu"], format=words[container, preset])
        assert (path.refusal is None) is run["loads"], (name, path.refusal, run)
        tried += 1
    assert tried > 45


# vLLM's list → our family, and the classes that are left out: other vendors' GPUs, weight-only twins, last resorts.
FAMILIES = {
    "_POSSIBLE_FP8_KERNELS": vllm_kernels.FP8,
    "_POSSIBLE_FP8_BLOCK_KERNELS": vllm_kernels.FP8_BLOCK,
    "_POSSIBLE_WFP8A16_KERNELS": vllm_kernels.FP8_WEIGHT_ONLY,
    "_POSSIBLE_INT8_KERNELS": vllm_kernels.INT8,
    "_POSSIBLE_KERNELS": vllm_kernels.MIXED,
    "_POSSIBLE_MXFP8_KERNELS": vllm_kernels.MXFP8,
    "_POSSIBLE_MXFP6_KERNELS": vllm_kernels.MXFP6,
    "_POSSIBLE_MXFP4_KERNELS": vllm_kernels.MXFP4,
    "_POSSIBLE_NVFP4_KERNELS": vllm_kernels.NVFP4,
}
LEFT_OUT = {
    "CutlassW4A8", "RDNA3W4A16", "RDNAHybridW4A16", "HummingMxfp8", "FlashInferTrtllmMxfp8", "HummingNvFp4",
    "FlashInferTrtllmNvFp4", "FlashInferCudnnNvFp4", "FbgemmNvFp4", "B12xNvFp4", "B12xNvFp4W4A16", "TorchNvFp4",
}  # fmt: skip
# A GPU of each kind, for which the order of what is left must be the list's.
SEEN = {"CUDA": ("a100", "l4", "b200", "rtx 5090"), "ROCM": ("mi300x", "mi355x")}


def _short(name: str) -> str:
    for ending in ("LinearKernel", "ScaledMM", "Kernel"):
        name = name.removesuffix(ending)
    return name.removesuffix("ScaledMM")


def _lists() -> dict[str, dict[str, list[str]]]:
    found = sorted(
        ROOT.glob(".venv-engine/lib/python3*/site-packages/vllm/model_executor/kernels/linear/__init__.py")
    )
    if not found:
        pytest.skip("vLLM's source is not here: engines/setup.sh installs its CPU build")
    lists = {}
    for node in ast.parse(found[0].read_text()).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Dict)
        ):
            lists[node.target.id] = {
                key.attr: [_short(item.id) for item in value.elts if isinstance(item, ast.Name)]
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(key, ast.Attribute) and isinstance(value, ast.List)
            }
    return lists


@pytest.mark.parametrize("name", list(FAMILIES))
def test_order_is_that_of_vllms_source(name: str) -> None:
    """Every kernel of a family stands in vLLM's list, in its order on each GPU, and what is not listed is known."""
    lists = _lists()[name]
    family: tuple[Kernel, ...] = FAMILIES[name]
    for platform, boards in SEEN.items():
        order = lists.get(platform, [])
        for board in boards:
            ours = list(dict.fromkeys(kernel.name for kernel in family if kernel.reach.holds(gpus[board])))
            assert set(ours) <= set(order), (name, board)
            assert ours == [each for each in order if each in ours], (name, board)
        reached = {kernel.name for kernel in family}
        assert {each for each in order if each not in reached} <= LEFT_OUT, (name, platform)


def test_every_list_of_kernels_is_covered() -> None:
    """A new family in vLLM must get one here."""
    assert {name for name in _lists() if name.startswith("_POSSIBLE")} == set(FAMILIES)
