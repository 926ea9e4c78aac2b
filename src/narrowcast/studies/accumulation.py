"""What an accumulator adds to the error of a quantized linear: sampled sums, beside the exact ones and the bounds.

    error = |Σ as the accumulator forms it - Σ exact| / Σ |x|·|w|        per output, over the same codes and scales

The model runs once over a piece of text; of some layers, some rows of what enters each linear and some of its output
channels are multiplied again, as ``kernels.reference.accumulate`` has it. Scales that a whole row shares fold out and
change no relative error; where scales change every 128 elements each stretch is a sum of its own, multiplied and added
in fp32, which is what engines do. INT8 sums are exact on every machine. Layers that read one input and have one shape
give nearly the same numbers, so a row stands for one linear of one layer.

Left out: products that no tensor core forms (MX operands on Hopper, INT4 weights with FP8 inputs), which engines decode
to 16 bit first: those rows say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from narrowcast.kernels.reference.accumulate import (
    CORES,
    PLAIN,
    BlockScales,
    Core,
    core,
    element_exponent,
    plain_sum,
    tensor_core,
    worst_case,
)
from narrowcast.kernels.reference.gemm import UNIT, sums_integers
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Kind
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.quantizing import quantized
from narrowcast.runtime.stored import codes_of
from narrowcast.runtime.walk import Running
from narrowcast.studies.evaluation import Sums
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme

ROWS, COLUMNS, LAYERS = 8, 32, 3
UNITS = {"bf16": 2.0**-8, "fp32": UNIT, "fp32_pairwise": UNIT, "exact": 0.0}
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def check_name(name: str) -> None:
    """Refuse an accumulator that does not exist."""
    if name not in PLAIN:
        core(name, "fp8")


@torch.inference_mode()
def sampled(run: Running, ids: Sequence[int], name: str, layers: int = LAYERS) -> list[Sums]:
    """Sums of some layers of a model over a text's first tokens, under the accumulator ``name``.

    Raises UsageError for an unknown name.
    """
    check_name(name)
    state = run.begin(torch.tensor(ids))
    chosen = set(np.linspace(0, run.depth - 1, min(layers, run.depth)).round().astype(int).tolist())
    found: list[Sums] = []
    for i in range(max(chosen) + 1):
        layer = run.layer(i)
        hooks = list(_watch(layer, run, name, found)) if i in chosen else []
        run.step(layer, i, state)
        for hook in hooks:
            hook.remove()
    return found


def _watch(layer: nn.Module, run: Running, name: str, found: list[Sums]) -> Iterator[Any]:
    def look(module: ScaledLinear, arguments: tuple[torch.Tensor, ...]) -> None:
        rows = arguments[0].reshape(-1, arguments[0].shape[-1])
        if len(rows):
            picked = rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()]
            found.append(_sums(module, picked, run, name))

    for module in layer.modules():
        if isinstance(module, ScaledLinear):
            yield module.register_forward_pre_hook(look)


def _sums(layer: ScaledLinear, x: torch.Tensor, run: Running, name: str) -> Sums:
    row = partial(Sums, layer.name, k=layer.in_features)
    inputs = layer.inputs
    if inputs is None:
        fmt = FP16 if run.dtype == torch.float16 else BF16
        wide = x.to(torch.float16 if fmt is FP16 else torch.bfloat16).float().numpy()
        return _one(row, name, "fp16", wide, layer.weight.matrix[:COLUMNS].numpy(), 1 - fmt.bias)
    if inputs.order is not None or inputs.factors is not None or inputs.threshold is not None or inputs.zero:
        return row(how=name, said="its input is reordered, scaled, shifted or split first")
    qx, qw = quantized(x, inputs.scheme, inputs.static), _weight(layer, run)
    if sums_integers(qx.scheme) and sums_integers(qw.scheme):
        return row(how="int32", error=0.0, noise=0.0, worst=0.0, said="integer sums are exact")
    kind = _kind(qx.scheme, qw.scheme)
    if kind is None:
        return row(how=name, said=f"no tensor core multiplies {qw.scheme.name} with {qx.scheme.name}")
    return _coded(row, name, kind, qx, qw)


def _weight(layer: ScaledLinear, run: Running) -> QTensor:
    """The layer's first output channels, whole tiles, as codes and scales."""
    one = run.weights.find(layer.name)
    if one.coded is not None:
        whole = codes_of(one, one.coded, run.weights.sharing(layer.name)[0])
    else:
        assert run.weights.online is not None
        values = torch.from_numpy(np.ascontiguousarray(one.values(0, one.shape[0])))
        whole = quantized(values, run.weights.online.linear.weight)
    return whole.rows(0, _tiles(COLUMNS, whole.scheme.inner.tile[0], one.shape[0]))


def _tiles(wanted: int, height: int, rows: int) -> int:
    return min(-(-wanted // max(height, 1)) * max(height, 1), rows)


def _kind(x: Scheme, w: Scheme) -> str | None:
    """What kind of tensor core multiplies the two, None where none does."""
    small = [s for s in (x, w) if s.element.kind is Kind.FLOAT and s.zero is None]
    if len(small) < 2:
        return None
    if all(s.inner.format is FP32 and s.element.bits == 8 for s in small):
        return "fp8"
    if all(s.element.bits == 4 for s in small) and x.inner.tile == w.inner.tile:
        return "fp4"
    blocks = all(s.inner.format is E8M0 and s.inner.tile == (1, 32) for s in small)
    return "mx" if blocks else None


def _coded(row: Any, name: str, kind: str, qx: QTensor, qw: QTensor) -> Sums:
    x, w = qx.elements(), qw.elements()[:COLUMNS]
    # The narrower exponent range of two formats: both are E4M3 or E5M2, or one is smaller and its normals are too.
    smallest = min(element_exponent(q.scheme.element) for q in (qx, qw))
    if kind == "fp8":
        edges = _stretches(qx, qw)
        sx, sw = _at(qx, edges), _at(qw, edges)[:COLUMNS]
        return _one(row, name, kind, x, w, smallest, None, (edges, sx, sw))
    a, b = qx.scale_values(0), qw.scale_values(0)[:COLUMNS]
    fmt = qx.scheme.inner.format
    least = -127 if fmt is E8M0 else element_exponent(fmt)
    return _one(row, name, kind, x, w, smallest, BlockScales(a, b, qx.scheme.group, least))


def _stretches(qx: QTensor, qw: QTensor) -> list[int]:
    k = qx.shape[1]
    return sorted({*range(0, k, qx.scheme.group or k), *range(0, k, qw.scheme.group or k)})


def _at(q: QTensor, edges: Sequence[int]) -> F32:
    """The scale of every row in every stretch [rows, stretches]."""
    values, (height, width) = q.scale_values(0), q.scheme.inner.tile
    columns = values[:, [edge // width if width else 0 for edge in edges]]
    return np.repeat(columns, height or q.shape[0], axis=0)[: q.shape[0]]


def _one(
    row: Any, name: str, kind: str, x: F32, w: F32, smallest: int, scales: BlockScales | None = None,
    folded: tuple[list[int], F32, F32] | None = None,
) -> Sums:  # fmt: skip
    """Sum one way and exactly. ``folded`` are stretches of k with their scales, which come after each sum."""
    edges, sx, sw = folded or ([0], np.ones((len(x), 1), np.float32), np.ones((len(w), 1), np.float32))
    how: Core | None = None
    if name not in PLAIN:
        if kind not in CORES[name.split("_")[0]]:
            said = f"{name.split('_')[0]} has no tensor core for it; engines decode it first"
            return row(how=name, said=said)  # type: ignore[no-any-return]
        how = core(name, kind)
    a, b = (x, w) if scales is None else (x * _spread(scales.x, scales), w * _spread(scales.w, scales))
    exact, got, size = (np.zeros((len(x), len(w))) for _ in range(3))
    for s, (first, end) in enumerate(zip(edges, [*edges[1:], x.shape[1]], strict=True)):
        part = slice(first, end)
        factor = sx[:, s, None] * sw[None, :, s]
        if how is None:
            summed = plain_sum(a[:, part], b[:, part], name)
        else:
            summed = tensor_core(x[:, part], w[:, part], how, smallest, scales)
        wide = (
            np.float64 if name == "exact" else np.float32
        )  # what sums and scales are multiplied and added in
        got = (got.astype(wide) + summed.astype(wide) * factor).astype(np.float64)
        exact += plain_sum(a[:, part], b[:, part], "exact") * factor.astype(np.float64)
        size += plain_sum(abs(a[:, part]), abs(b[:, part]), "exact") * factor.astype(np.float64)
    longest = max(end - first for first, end in zip(edges, [*edges[1:], x.shape[1]], strict=True))
    error = np.abs(got - exact)
    # The scales' product, their product with a sum, and the sums of stretches.
    after = worst_case(len(edges) + 2, UNIT)
    worst = how.worst(longest) if how is not None else worst_case(longest, UNITS[name])
    steps = how.steps(longest) if how is not None else longest
    return row(  # type: ignore[no-any-return]
        how=how.name if how is not None else name,
        steps=steps,
        error=float((error / np.where(size == 0, 1, size)).max()),
        noise=float(np.sqrt((error**2).mean() / max((exact**2).mean(), np.finfo(np.float64).tiny))),
        worst=worst + (1 + worst) * after,
        likely=how.likely(longest) if how is not None else None,
    )


def _spread(values: F32, scales: BlockScales) -> F32:
    return np.repeat(values, scales.block, axis=1)
