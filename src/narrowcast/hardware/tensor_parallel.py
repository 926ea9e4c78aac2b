"""Tensor parallelism: what a split must keep whole, from the rules that engines check while they build a layer.

A column-parallel layer gives each rank N / tp rows of its weight, a row-parallel one K / tp columns:

    column   N / tp  must be whole blocks and whole words        q, k, v, gate, up
    row      K / tp  must be whole blocks, groups and words       o, down

Matrices that are loaded as one layer are split one by one: of gate and up with 320 rows each, the 640 together are
five blocks of 128 and neither of them is a number of blocks. Marlin's tiles break nothing in vLLM, which pads them.

vLLM does not check this of a fused layer in its own fp8 container. It loads q, k and v of 576, 192 and 192 rows into
one grid of 128x128, and k's scales, counted from row 576 on, are applied from row 640 on: 3 to 13 dB are left of k in
SmolLM2-135M, and log-probabilities are a nat away. That counts as refused here, under another word.

Source: vLLM 0.32 (validate_fp8_block_shape, allow_fp8_block_shape_mismatch, adjust_block_scale_shard, kernels/linear;
run on a CPU), SGLang 0.5.23 (fp8.py). Left out: heads, which the model
decides, and expert parallelism, which splits no matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from narrowcast.hardware.engines import paths
from narrowcast.hardware.kinds import weight_kind
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme

Split = Literal["column", "row"]


@dataclass(frozen=True)
class Whole:
    """One rule: in these containers and for these weights (none: all) a rank's dimension is a multiple of ``unit``."""

    split: Split
    unit: Callable[[Scheme], int]
    what: str
    containers: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()


def _rows(scheme: Scheme) -> int:
    return max(scheme.inner.tile[0], 1)


def _columns(scheme: Scheme) -> int:
    return max(scheme.group, 1)


def _word(scheme: Scheme) -> int:
    """Codes in a word of 32 bits that a split may not cut: 32 of them where they straddle words."""
    return 32 // scheme.element.bits if 32 % scheme.element.bits == 0 else 32


def _byte(scheme: Scheme) -> int:
    return 2 if scheme.element.bits == 4 else 4 if scheme.element.bits == 6 else 1


RULES: tuple[Whole, ...] = (
    Whole("column", _rows, "rows of a block"),
    Whole("row", _columns, "columns that share a scale"),
    Whole("column", _word, "codes of a word along N", ("awq", "gptq", "auto-round"), ("int4", "uint4", "int8_group")),
    Whole("column", _word, "codes of a word along N", ("quark",), ("int4", "uint4")),
    Whole("column", lambda scheme: 2, "rows of a byte", ("modelopt",), ("int4",)),
    Whole("row", _word, "codes of a word along K", ("gptq", "auto-round"), ("int4", "int8_group", "int8_channel")),
    Whole(
        "row", _word, "codes of a word along K", ("compressed-tensors",),
        ("int4", "uint4", "int8_group", "int_odd", "uint_odd"),
    ),
    Whole("row", _byte, "codes of a byte", (), ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nf4", "bnb_fp4")),
)  # fmt: skip


def tp_problems(
    engine: str,
    container: str,
    linear: LinearScheme,
    shape: tuple[int, int],
    tp: int,
    split: Split,
    *,
    fused: bool = False,
    last: bool = True,
) -> str | None:
    """What breaks when ``tp`` ranks share a matrix of ``shape`` [N, K], or None.

    ``fused``: the engine loads it with siblings as one layer; ``last``: it is the last of them. On one rank blocks may
    be cut off at an edge, but inside a fused layer only at its end (vLLM), or nowhere (SGLang).
    """
    whole = shape[0] if split == "column" else shape[1]
    name = "N" if split == "column" else "K"
    if whole % tp:
        return f"{name} = {whole} is not a multiple of {tp}"
    part = whole // tp
    for rule in _rules(container, linear, split):
        unit = rule.unit(linear.weight)
        if part % unit and (tp > 1 or _inside(engine, fused, last, split)):
            return f"{_part(name, whole, tp)} is not a multiple of {unit}, the {rule.what}"
    if container == "modelopt" and weight_kind(linear.weight) == "fp8_block128":
        columns = part if split == "row" else shape[1]
        if columns % 128:
            return f"K = {columns} of a rank is not a multiple of 128, which FP8_PB_WO asks for"
    return _no_kernel(engine, container, linear, shape, tp, split)


def units(container: str, linear: LinearScheme, split: Split) -> tuple[tuple[int, str], ...]:
    """What a rank's share of the divided side is made of, largest first: (128, "rows of a block")."""
    found = {rule.unit(linear.weight): rule.what for rule in _rules(container, linear, split)}
    return tuple(sorted(((unit, what) for unit, what in found.items() if unit > 1), reverse=True))


def misplaces(engine: str, container: str, linear: LinearScheme, fused: bool) -> bool:
    """Whether the engine loads what ``tp_problems`` tells of cut blocks, and applies scales to rows of their
    neighbours: vLLM, which checks no fused layer whose config has a weight_block_size."""
    return fused and (engine, container) == ("vllm", "fp8") and linear.weight.inner.tile[0] > 1


def partial_tiles(linear: LinearScheme, shape: tuple[int, int]) -> str | None:
    """Which edge of a matrix [N, K] cuts a block or a group, or None where all are whole."""
    sides = zip("NK", shape, (_rows(linear.weight), _columns(linear.weight)), strict=True)
    cut = [f"{name} = {size} is not a multiple of {unit}" for name, size, unit in sides if size % unit]
    return " and ".join(cut) or None


def _rules(container: str, linear: LinearScheme, split: Split) -> Iterator[Whole]:
    kind = weight_kind(linear.weight)
    for rule in RULES:
        if (
            rule.split == split
            and (not rule.containers or container in rule.containers)
            and (not rule.weights or kind in rule.weights)
        ):
            yield rule


def _inside(engine: str, fused: bool, last: bool, split: Split) -> bool:
    """Whether a cut block would lie inside a layer of one rank; transformers loads siblings one by one."""
    fuses = fused and engine != "transformers"
    return split == "column" and fuses and (not last or engine == "sglang")


def _part(name: str, whole: int, tp: int) -> str:
    return f"{name} = {whole}" if tp == 1 else f"{name} / {tp} = {whole // tp}"


def _no_kernel(
    engine: str, container: str, linear: LinearScheme, shape: tuple[int, int], tp: int, split: Split
) -> str | None:
    """The refusal of a rank's part, where the whole matrix has a kernel; on one rank that of the matrix itself, where
    its shape is the reason."""
    if tp == 1:
        said = paths(engine, container, linear, shape=shape).refusal
        return said if paths(engine, container, linear).refusal is None else None
    part = (shape[0] // tp, shape[1]) if split == "column" else (shape[0], shape[1] // tp)
    before, after = (paths(engine, container, linear, shape=each) for each in (shape, part))
    if before.refusal is None and after.refusal is not None:
        return f"a rank's {part[0]}x{part[1]}: {after.refusal}"
    if not before.package and after.package:
        return f"a rank's {part[0]}x{part[1]} has a kernel only with {after.package} installed"
    return None
