"""Tensors that travel as they are: whole, cut out of a stack, or put into one."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from narrowcast.jobs.plan import Copy
from narrowcast.store.checkpoint import Checkpoint

COPY_BYTES = 4 << 20


def copied(source: Checkpoint, copy: Copy) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The bytes of a carried tensor in pieces: (offset, uint8 array)."""
    if copy.members:
        yield 0, _stacked(source, copy)
        return
    if copy.channels is not None and copy.expert is not None:
        whole = source.rows(copy.tensor, copy.expert, copy.expert + 1)[0]
        yield 0, np.ascontiguousarray(whole[copy.channels]).view(np.uint8)
        return
    for at in range(0, copy.nbytes, COPY_BYTES):
        data = np.empty(min(COPY_BYTES, copy.nbytes - at), np.uint8)
        source.read_into(copy.tensor, data, at)
        yield at, data


def _stacked(source: Checkpoint, copy: Copy) -> NDArray[np.uint8]:
    """The bytes of a stack that is put together from its members, which are small."""
    stack = np.empty((*copy.shape, copy.nbytes // prod(copy.shape)), np.uint8)
    for member in copy.members:
        data = np.concatenate([piece for _, piece in copied(source, member)])
        assert member.to is not None
        stack[member.to.expert, member.to.first :: member.to.step] = data.reshape(-1, stack.shape[-1])
    return stack.reshape(-1)
