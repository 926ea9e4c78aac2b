"""Linear layers that hold packed codes only, for generating tokens: bytes per parameter are what decoding costs.

A step of one sequence multiplies every weight with one vector, so its time is the time to read the weights. Up to
``FEW`` rows go through ``kernels.choose_matvec``, which reads codes where they lie; more rows, a prompt, are multiplied
in BLAS with a stretch of decoded rows at a time, so that no decoded copy of a weight is ever whole in memory.

    model = packed("checkpoint")                     codes as they are stored
    model = packed("bf16-model", scheme="fp8_channel")   plain weights, quantized while they are loaded

Both give transformers' own class, with a ``PackedLinear`` for every linear that is quantized. Inputs stay wide unless
the checkpoint says how they are quantized.

Large products are cut between as many threads as torch uses, the caller being one of them; small ones stay on the
caller's, for which starting another takes longer than the work.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from narrowcast.errors import UsageError
from narrowcast.jobs.coded import Logical
from narrowcast.jobs.matching import Held
from narrowcast.kernels import Rows, choose, choose_matvec
from narrowcast.numbers.formats import FP32, Format, Kind, formats
from narrowcast.runtime.engine import loaded
from narrowcast.runtime.inputs import Inputs
from narrowcast.runtime.linear import Seen
from narrowcast.runtime.outer import Head
from narrowcast.runtime.product import Operand, product
from narrowcast.runtime.stored import inputs_of
from narrowcast.runtime.walk import Running
from narrowcast.runtime.weights import Weights
from narrowcast.tensors.packing import Packing, packing
from narrowcast.tensors.presets import EXCLUDED_ROLES, LinearScheme
from narrowcast.tensors.scaling import outer_scale
from narrowcast.tensors.schemes import Scheme, schemes

FEW = 8  # rows that the packed product takes
ALONE = 2_000_000  # weights up to which one thread is faster than two
STRETCH = 1 << 20  # weights that are decoded at once
CARRIERS = {torch.float32: "uint32", torch.bfloat16: "uint16"}


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix [N, k] as it is stored; ``outer`` as in ``kernels``."""

    rows: Rows
    scheme: Scheme
    packing: Packing
    k: int
    outer: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows.packed), self.k

    def decoded(self, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop, ``start`` on a tile, as float32."""
        height = self.scheme.inner.tile[0]
        tiles = slice(start // height, -(-stop // height)) if height else slice(None)
        zero = None if self.rows.zero is None else self.rows.zero[tiles]
        part = Rows(self.rows.packed[start:stop], self.rows.scales[tiles], zero)
        backend = choose(self.scheme, FP32, self.packing).backend
        return torch.from_numpy(backend.dequantize(part, self.scheme, self.packing, self.k, FP32, self.outer))


def pack(stored: np.ndarray[Any, Any], source: Format, scheme: Scheme) -> PackedWeight:
    """A plain weight [N, K] in its carrier, quantized. NonFiniteError for NaN and infinity."""
    element = scheme.element
    how = packing(element.bits, flip=element.kind is Kind.INT and element.signed and element.bits == 4)
    backend = choose(scheme, source, how).backend
    outer = None
    if len(scheme.scales) == 2:
        amax = np.full((1, 1), backend.scan(stored, source).amax, np.float32)
        outer = float(outer_scale(amax, scheme, source)[0, 0])
    return PackedWeight(
        backend.quantize(stored, source, scheme, how, outer), scheme, how, stored.shape[1], outer
    )


class PackedLinear(nn.Module):
    """A linear layer [N, K] that holds its packed weight. ``reason`` says why it has no compiled product, if so."""

    def __init__(
        self,
        name: str,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        inputs: Inputs | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self.name, self.weight, self.bias, self.inputs = name, weight, bias, inputs
        self.threads = threads or torch.get_num_threads()
        self.out_features, self.in_features = weight.shape
        multiplies, self.reason = choose_matvec(
            weight.rows, weight.scheme, weight.packing, weight.k, weight.outer
        )
        self.kernel: Any = None if self.reason else multiplies
        self.seen = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        few = self.kernel is not None and x.numel() <= FEW * self.in_features
        if few and self.inputs is None:
            y = self._few(x)
        else:
            rows = x.reshape(-1, self.in_features)
            operand = Operand(rows) if self.inputs is None else self.inputs.operand(rows, self.seen)
            y = self._few(operand.matrix) if few else self._many(operand.matrix)
            y = (y if operand.scale is None else y * operand.scale).reshape(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)

    def _few(self, x: torch.Tensor) -> torch.Tensor:
        """Up to ``FEW`` rows [..., K], codes read where they lie."""
        x = (x if x.dtype in CARRIERS else x.float()).contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features, dtype=torch.float32)
        call = (x.data_ptr(), CARRIERS[x.dtype], x.numel() // self.in_features, y.data_ptr())
        n, threads = self.out_features, self.threads
        if threads == 1 or n * self.in_features <= ALONE:
            self.kernel.into(*call, 0, n)
            return y
        ends = [n * i // threads for i in range(threads + 1)]
        others = [
            _pool(threads - 1).submit(self.kernel.into, *call, *ends[i : i + 2]) for i in range(1, threads)
        ]
        self.kernel.into(*call, *ends[:2])
        for other in others:
            other.result()
        return y

    def _many(self, rows: torch.Tensor) -> torch.Tensor:
        """Any number of rows, the weight decoded a stretch at a time."""
        height = max(self.weight.scheme.inner.tile[0], 1)
        step = max(STRETCH // self.in_features // height, 1) * height
        x = Operand(rows.float())
        parts = [
            product(x, Operand(self.weight.decoded(i, min(i + step, self.out_features))))
            for i in range(0, self.out_features, step)
        ]
        return torch.cat(parts, dim=1)

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads."""
        if self.kernel is not None:
            return int(self.kernel.nbytes)
        rows = self.weight.rows
        return rows.packed.nbytes + rows.scales.nbytes + (0 if rows.zero is None else rows.zero.nbytes)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, weight={self.weight.scheme.name}"


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Threads beside the caller's, started once."""
    return ThreadPoolExecutor(count, "narrowcast-matvec")


@dataclass
class PackedWeights(Weights):
    """Weights whose quantized linears stay packed, and whose plain ones are torch's own."""

    scheme: Scheme | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def linear(self, path: str, bias: bool = False, shape: tuple[int, int] | None = None) -> Any:
        one = self.find(path)
        offset = self.tensor(f"{path}.bias").float().reshape(-1) if bias else None
        coded = one.coded
        if coded is not None and self._stays_packed(one):
            linear, (together, alike) = coded.stored.linear, self.sharing(path)
            rows, outer, _ = loaded(one, coded, together)
            weight = PackedWeight(rows, coded.how.scheme, coded.how.packing, coded.shape[1], outer)
            inputs = inputs_of(one, coded, linear, alike) if linear.input is not None else None
            return self._noted(PackedLinear(path, weight, offset, inputs))
        if coded is None and self.scheme is not None and self._takes(one):
            assert one.dtype is not None
            assert one.dtype.format is not None
            stored = one.stored(0, one.source.shape[0])
            return self._noted(
                PackedLinear(path, pack(stored, formats[one.dtype.format], self.scheme), offset)
            )
        if coded is not None:
            return super().linear(path, bias, shape)
        return _plain(self.tensor(f"{path}.weight"), offset)

    def _stays_packed(self, one: Held) -> bool:
        """Whether columns lie as they are read, and one scale for a row is all that comes off a product."""
        assert one.coded is not None
        asymmetric = one.coded.how.part("input_zero") is not None or _asymmetric(one.coded.stored.linear)
        plain = one.coded.how.part("offset") is None and all(part is None for part in one.columns())
        return plain and not asymmetric

    def _takes(self, one: Held) -> bool:
        return one.kind == "Linear" and one.role not in EXCLUDED_ROLES

    def _noted(self, layer: PackedLinear) -> PackedLinear:
        if layer.reason:
            self.reasons[layer.name] = layer.reason
        return layer


def packed(
    model: str | Path, scheme: str | None = None, dtype: str | None = None, head: bool = False
) -> tuple[Any, PackedWeights]:
    """A whole transformers model that generates from packed weights, and its weights, whose ``reasons`` name the
    layers without a compiled product.

    ``scheme`` quantizes linears that are stored plain, ``head`` the output head too. Raises what ``Running.open``
    does, and UsageError for an unknown scheme or one that needs a checkpoint of plain weights.
    """
    with Running.open(model, dtype) as running:
        chosen = schemes[scheme] if scheme is not None else None
        if chosen is None and not any(isinstance(one, Logical) for one in running.opened.entries.values()):
            raise UsageError(
                "this checkpoint is not quantized", where=running.root, remedy="name a scheme to quantize it with"
            )  # fmt: skip
        weights = PackedWeights(running.opened, running.dtype, None, scheme=chosen)
        running.weights = weights
        whole = running.resident()
    for name, module in list(whole.named_modules()):
        if isinstance(module, Head):
            above, _, leaf = name.rpartition(".")
            setattr(whole.get_submodule(above), leaf, _head(name, module, chosen if head else None))
    return whole, weights


def _head(name: str, head: Head, scheme: Scheme | None) -> nn.Module:
    """An output head as torch's own linear, in the memory of the embedding where it is tied to it, or packed."""
    if scheme is None:
        return _plain(head.narrow, head.bias)
    return PackedLinear(name, pack(head.narrow.float().numpy(), FP32, scheme), head.bias)


def _asymmetric(linear: LinearScheme) -> bool:
    return linear.input is not None and linear.input.zero is not None


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    return layer
