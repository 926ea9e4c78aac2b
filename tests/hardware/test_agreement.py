"""The rows against what else knows: vLLM's source, and runs of its CPU build."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from narrowcast.containers import containers
from narrowcast.hardware.engines import paths, vllm_kernels
from narrowcast.hardware.engines.row import Kernel
from narrowcast.hardware.gpus import gpus
from narrowcast.numbers.formats import BF16
from narrowcast.tensors.presets import presets

ROOT = Path(__file__).parents[2]


def word(container: str, preset: str) -> str:
    """The container's own word for a preset."""
    spelling = containers[container].spelling
    assert spelling is not None
    return spelling(presets[preset].linear, BF16).format


def test_cpu_rows_agree_with_runs() -> None:
    """What vLLM's CPU build did with a file of each kind is what the rows say of the CPU.

    A layer of 576 rows is refused in blocks of 128 for its shape, which tests of tensor parallelism cover.
    """
    files = json.loads((ROOT / "engines" / "results.json").read_text())["avx512_bf16"]["files"]
    tried = 0
    for name, run in files.items():
        container, preset = name.split("/")
        if "is not divisible by weight quantization block" in run.get("message", ""):
            continue
        path = paths("vllm", container, presets[preset].linear, gpus["cpu"], format=word(container, preset))
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
