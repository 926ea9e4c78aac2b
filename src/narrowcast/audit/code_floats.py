"""Rules about the numbers of unquantized tensors: NaN and infinity, the absurdly large, zeros, constants.

Each tensor of floats was read once for its amax and what is not finite; where all of a tensor may be one value, its
first kilobytes say whether to look at the rest.

Vectors are left alone by the last two: biases of zeros and norms of ones are what training starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.jobs.matching import Held
from narrowcast.jobs.stream import Floats, Slice, chunks
from narrowcast.kernels import Scan
from narrowcast.model.roles import Role

Seen = tuple[Held, Scan]
SQUARE = 2.0**64  # the smallest power of two whose square is beyond fp32
GLANCE = 4096  # bytes
BUFFERS = frozenset(
    {Role.OTHER, Role.ROTARY}
)  # masks and tables among them, where -inf or a constant means something
COPY = "copy the tensor from the original checkpoint again"


@rule("NC302", "error", scope="tensor", reads="codes")
def nonfinite_weight(seen: Seen) -> Iterator[Finding]:
    """An unquantized tensor holds NaN or infinity.

    What: some elements of a tensor that stays in BF16, FP16 or FP32 are not finite.
    Why: a NaN in a norm, an embedding or a router reaches every later layer; in a weight it spoils an output channel.
    Fix: copy the tensor again. If the original has it too, it was saved from a diverged run, or FP16 overflowed.
    False alarm: an attention mask that is stored as a buffer; infinity there is only a warning.
    """
    held, scan = seen
    if not scan.nan and not scan.inf:
        return
    at = tuple(int(i) for i in np.unravel_index(scan.first, held.shape)) if held.shape else None
    yield Finding(
        f"{scan.nan} NaN and {scan.inf} infinities in {prod(held.shape)} elements", tensor=_tensor(held), at=at,
        wanted="finite numbers", remedy=COPY, count=scan.nan + scan.inf, facts={"nan": scan.nan, "inf": scan.inf},
        severity="error" if scan.nan or held.role not in BUFFERS else "warning",
    )  # fmt: skip


@rule("NC303", "warning", scope="tensor", reads="codes")
def huge_weight(seen: Seen) -> Iterator[Finding]:
    """An unquantized tensor holds a number whose square is beyond FP32.

    What: the largest magnitude is 2^64 or more, such as 3e38.
    Why: products with it overflow, and a quantizer that takes its scale from it turns everything else into zero.
    Fix: look at the element in the original checkpoint; it is a damaged bit or an uninitialised value.
    False alarm: the most negative number as a mask in a buffer; such buffers are left out where they are known.
    """
    held, scan = seen
    if scan.amax >= SQUARE and held.role not in BUFFERS:
        yield Finding(
            f"the largest magnitude is {scan.amax:.3g}", tensor=_tensor(held), at=_largest(held, scan),
            got=f"{scan.amax:.3g}", wanted="below 1.8e19", remedy=COPY, facts={"amax": scan.amax},
        )  # fmt: skip


def _tensor(held: Held) -> str:
    """The tensor in the file; of a stack, the expert's projection."""
    source = held.source
    if isinstance(source, Floats) or (isinstance(source, Slice) and source.expert is None):
        return source.tensor
    return held.name


def _largest(held: Held, scan: Scan) -> tuple[int, ...] | None:
    n, k = held.source.shape
    for i, j in chunks(n, k * held.carrier.itemsize, 1, held.source.chunk_bytes):
        found = np.abs(held.values(i, j)) == np.float32(scan.amax)
        if found.any():
            return tuple(int(x) for x in np.unravel_index(i * k + int(found.argmax()), held.shape))
    return None


@rule("NC322", "warning", scope="tensor", reads="codes")
def zero_weight(seen: Seen) -> Iterator[Finding]:
    """An unquantized matrix is zero everywhere.

    What: every element of a matrix of two axes or more is zero.
    Why: the layer adds nothing, or an embedding says nothing. The weights were lost, or never written.
    Fix: copy the tensor again from the original checkpoint.
    False alarm: a layer that is initialised to zero and was never trained, such as LoRA's second matrix.
    """
    held, scan = seen
    if scan.amax == 0 and not scan.nan and not scan.inf and _is_weight(held):
        size = prod(held.shape)
        yield Finding(f"all {size} elements are zero", tensor=_tensor(held), remedy=COPY, count=size)


@rule("NC323", "warning", scope="tensor", reads="codes")
def constant_weight(seen: Seen) -> Iterator[Finding]:
    """An unquantized matrix has the same value everywhere.

    What: every element of a matrix of two axes or more is one number, which is not zero.
    Why: no trained matrix looks like this. It is a placeholder, or was filled and never written.
    Fix: copy the tensor again from the original checkpoint.
    False alarm: a test model with constant weights.
    """
    held, scan = seen
    if scan.amax > 0 and not scan.nan and not scan.inf and _is_weight(held) and _constant(held):
        size = prod(held.shape)
        yield Finding(
            f"all {size} elements are the same number of magnitude {scan.amax:.6g}", tensor=_tensor(held), remedy=COPY,
            count=size,
        )  # fmt: skip


def _is_weight(held: Held) -> bool:
    return held.role not in BUFFERS and len(held.shape) > 1 and min(held.shape) > 1


def _constant(held: Held) -> bool:
    n, k = held.source.shape
    head = _head(held)
    if head.size and (head != head[0]).any():
        return False
    first = held.stored(0, 1)[0, 0]
    parts = chunks(n, k * held.carrier.itemsize, 1, held.source.chunk_bytes)
    return all(bool((held.stored(i, j) == first).all()) for i, j in parts)


def _head(held: Held) -> np.ndarray:
    """The first elements of the tensor's matrix as they lie in the file, whichever way round; none of what is not a
    tensor of its own or an expert of a stack."""
    tensor = getattr(held.source, "tensor", None)
    if tensor is None:
        return np.empty(0, held.carrier)
    begin, size = 0, held.checkpoint.entries[tensor].nbytes
    if isinstance(held.source, Slice) and held.source.expert is not None:
        size //= held.checkpoint.entries[tensor].shape[0]
        begin = held.source.expert * size
    head = np.empty(min(size, GLANCE) // held.carrier.itemsize, held.carrier)
    held.checkpoint.read_into(tensor, head, begin)
    return head
