"""Which splits keep blocks, groups and words whole."""

from __future__ import annotations

import pytest

from narrowcast.hardware.tensor_parallel import misplaces, partial_tiles, tp_problems
from narrowcast.tensors.presets import presets

SIZES = (1, 2, 4, 8, 16, 32)
BLOCK = presets["fp8_block"].linear


@pytest.mark.parametrize(
    ("size", "allowed"),
    [
        (18432, {1, 2, 4, 8, 16}),
        (2048, {1, 2, 4, 8, 16}),
        (1536, {1, 2, 4}),
        (320, set()),
        (10944, set()),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_field_case(engine: str, size: int, allowed: set[int]) -> None:
    """Blocks of 128: which sizes split into whole blocks, along the rows and along the columns."""
    columns = {tp for tp in SIZES if tp_problems(engine, "fp8", BLOCK, (size, 4096), tp, "column") is None}
    rows = {tp for tp in SIZES if tp_problems(engine, "fp8", BLOCK, (4096, size), tp, "row") is None}
    # One rank may hold a block that is cut off; that is all that is left of 320 and 10944.
    assert columns == rows == (allowed or {1})
    assert (partial_tiles(BLOCK, (size, 4096)) is None) is bool(allowed)
    whole = {tp for tp in columns if size % tp == 0 and partial_tiles(BLOCK, (size // tp, 4096)) is None}
    assert whole == allowed


def test_gate_and_up_are_split_one_by_one() -> None:
    """2·320 = 640 is five blocks, but gate's 320 end inside the third: refused even on one rank."""
    assert partial_tiles(BLOCK, (640, 4096)) is None
    gate = tp_problems("vllm", "fp8", BLOCK, (320, 4096), 1, "column", fused=True, last=False)
    assert gate == "N = 320 is not a multiple of 128, the rows of a block"
    # Up is the last of its layer, where vLLM lets a block be cut off, and SGLang does not.
    assert tp_problems("vllm", "fp8", BLOCK, (320, 4096), 1, "column", fused=True) is None
    assert tp_problems("sglang", "fp8", BLOCK, (320, 4096), 1, "column", fused=True) is not None
    assert tp_problems("vllm", "fp8", BLOCK, (320, 4096), 2, "column", fused=True) is not None


@pytest.mark.parametrize(
    "sizes", [(576, 192, 192), (512, 192, 192), (512, 128, 192), (512, 64, 64), (320, 320)]
)
def test_scales_of_a_fused_layer_fall_on_other_rows(sizes: tuple[int, ...]) -> None:
    """vLLM's loader for its own fp8 container, written down: one grid for all rows, each member's scales from the block
    on that the rows before it end in. What is refused elsewhere is what goes wrong here."""
    grid: dict[int, tuple[int, int]] = {}
    right, start = [], 0
    for member, size in enumerate(sizes):
        grid |= {-(-start // 128) + block: (member, block) for block in range(-(-size // 128))}
        right += [(start + row, (member, row // 128)) for row in range(size)]
        start += size
    wrong = any(grid.get(row // 128) != scale for row, scale in right)
    told = [
        tp_problems("vllm", "fp8", BLOCK, (n, 4096), 1, "column", fused=True, last=i + 1 == len(sizes))
        for i, n in enumerate(sizes)
    ]
    assert wrong is any(told)
    assert misplaces("vllm", "fp8", BLOCK, True)
    assert not misplaces("vllm", "compressed-tensors", BLOCK, True)  # where it stops instead


CASES = [
    ("vllm", "fp8", "fp8_block", (1536, 4096), 8, "column", "N / 8 = 192 is not a multiple of 128"),
    ("vllm", "fp8", "fp8_block", (4096, 1536), 8, "row", "K / 8 = 192 is not a multiple of 128"),
    ("vllm", "compressed-tensors", "w4a16", (4096, 1536), 8, "row", "K / 8 = 192 is not a multiple of 128"),
    ("vllm", "compressed-tensors", "w4a16", (1536, 4096), 8, "column", None),
    ("vllm", "compressed-tensors", "nvfp4", (4096, 1000), 8, "row", "K / 8 = 125 is not a multiple of 16"),
    ("vllm", "compressed-tensors", "nvfp4", (4096, 1024), 8, "row", None),
    ("vllm", "compressed-tensors", "mxfp4", (4096, 1344), 8, "row", "K / 8 = 168 is not a multiple of 32"),
    ("vllm", "compressed-tensors", "mxfp8", (4096, 1344), 8, "row", "K / 8 = 168 is not a multiple of 32"),
    ("vllm", "compressed-tensors", "fp8_dynamic", (4096, 1000), 8, "row", None),
    ("vllm", "compressed-tensors", "fp8_dynamic", (4100, 4096), 8, "column", "N = 4100 is not a multiple of 8"),
    ("vllm", "awq", "w4a16", (1056, 4096), 8, "column", "N / 8 = 132 is not a multiple of 8"),
    ("vllm", "compressed-tensors", "w4a16", (1056, 4096), 8, "column", None),
    ("vllm", "quark", "w4a16", (1056, 4096), 8, "column", "N / 8 = 132 is not a multiple of 8"),
    ("tensorrt-llm", "modelopt", "w4a16", (1032, 4096), 8, "column", "N / 8 = 129 is not a multiple of 2"),
    ("transformers", "fp8", "fp8_block", (4096, 320), 1, "row", "a block is found as shape / grid"),
    ("vllm", "gptq", "w4a16", (4096, 320), 1, "row", "not divisible by group_size"),
    ("vllm", "modelopt", "fp8_block", (4096, 320), 1, "row", "K = 320 of a rank is not a multiple of 128"),
    ("vllm", "compressed-tensors", "w4afp8", (1536, 4096), 8, "column", "only with humming installed"),
    ("vllm", "compressed-tensors", "w4afp8", (1024, 4096), 8, "column", None),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "container", "preset", "shape", "tp", "split", "problem"), CASES)
def test_what_breaks(
    engine: str, container: str, preset: str, shape: tuple[int, int], tp: int, split: str, problem: str | None
) -> None:
    found = tp_problems(engine, container, presets[preset].linear, shape, tp, split)  # type: ignore[arg-type]
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert problem in found
