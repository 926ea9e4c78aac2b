"""One layer of a KV cache: encoded rows, between a few first and a few last tokens that stay as they are.

    tokens    0 … F-1    F … t-L-1    t-L … t-1
    kept      as is      encoded      as is

The first tokens are attention sinks, and the last ones the most recent; a token is encoded when it leaves the window
of the last. What ``update`` gives back is what the cache holds afterwards, decoded: a token's own key and value come
back encoded too, as in engines that write the cache first and attend to it (vLLM; SGLang attends to a prompt's own
keys before they are encoded).

Layers with a sliding window keep their whole history; the mask hides what lies outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from narrowcast.runtime.caches.modes import CacheMode, Codec


@dataclass
class Seen:
    """What one side of a layer was given: ``elements`` that were encoded, ``clipped`` ones that lay beyond what the
    scale reaches, and ``token_bytes``, what a token takes, all heads together."""

    elements: int = 0
    clipped: int = 0
    token_bytes: int = 0

    @property
    def share(self) -> float:
        """Of the encoded elements, those that were clipped."""
        return self.clipped / self.elements if self.elements else 0.0


@dataclass
class LayerSeen:
    """Keys and values of one layer, apart."""

    k: Seen = field(default_factory=Seen)
    v: Seen = field(default_factory=Seen)


@dataclass(frozen=True)
class Kept:
    """How a tensor that ``update`` gave back lies in the cache: for attention that reads codes.

    ``codec`` None: nothing is encoded. ``wide``: some tokens are not. ``q_scale`` float32 [1] or [heads].
    """

    codec: Codec | None
    rows: torch.Tensor | None
    wide: bool
    q_scale: torch.Tensor


class Side:
    """Keys or values of one layer [batch, heads, tokens, dim]; ``mode`` None encodes nothing."""

    def __init__(
        self, mode: CacheMode | None, scale: torch.Tensor, seen: Seen, keep_first: int = 0, keep_last: int = 0
    ) -> None:
        self.mode, self.seen, self.keep_first, self.keep_last = mode, seen, keep_first, keep_last
        self.codec = None if mode is None else mode.codec(scale)
        self.first: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Put tokens behind those that are there."""
        heads, dim = x.shape[1], x.shape[-1]
        row = dim * x.element_size() if self.mode is None else self.mode.row_bytes(dim)
        self.seen.token_bytes = heads * row
        if self.codec is None:
            self.first = _joined(self.first, x)
            return
        room = self.keep_first - (0 if self.first is None else self.first.shape[-2])
        if room > 0 and self.rows is None and self.last is None:
            self.first, x = _joined(self.first, x[..., :room, :].clone()), x[..., room:, :]
        if x.shape[-2] == 0:
            return
        last = _joined(self.last, x)
        leaving = last.shape[-2] - self.keep_last
        if leaving > 0:
            self._encode(last[..., :leaving, :])
            last = last[..., leaving:, :].clone()  # a view would keep all the others alive
        self.last = last if last.shape[-2] else None

    def _encode(self, x: torch.Tensor) -> None:
        assert self.codec is not None
        rows, clipped = self.codec.encode(x)
        self.seen.elements += x.numel()
        self.seen.clipped += clipped
        self.rows = _joined(self.rows, rows)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Everything in the run's dtype, in order."""
        decoded = None if self.rows is None or self.codec is None else self.codec.decode(self.rows, dtype)
        parts = [part for part in (self.first, decoded, self.last) if part is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part for part in (self.first, self.rows, self.last) if part is not None]

    @property
    def tokens(self) -> int:
        return sum(part.shape[-2] for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def drop(self, tokens: int) -> None:
        """Forget so many tokens from the end; what was encoded stays encoded."""
        for name in ("last", "rows", "first"):
            part = getattr(self, name)
            if part is not None and tokens > 0:
                left = max(part.shape[-2] - tokens, 0)
                tokens -= part.shape[-2] - left
                setattr(self, name, part[..., :left, :].clone() if left else None)

    def select(self, batch: Any) -> None:
        """Keep rows of the batch, in this order."""
        for name in ("first", "rows", "last"):
            part = getattr(self, name)
            if part is not None:
                setattr(self, name, part[batch])


def _joined(before: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if before is None else torch.cat([before, x], dim=-2)


class CodedLayer(CacheLayerMixin):
    """A layer as transformers calls it; ``k`` and ``v`` are its two sides. Without a codec it keeps what it is given,
    bit for bit."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, k: Side, v: Side, q_scale: torch.Tensor) -> None:
        # Not the parent's constructor: it would set ``keys`` and ``values``, which are read from the rows here.
        self.k, self.v, self.q_scale = k, v, q_scale
        self.dtype = torch.float32

    @property
    def is_initialized(self) -> bool:
        return bool(self.k.parts)

    @property
    def keys(self) -> torch.Tensor | None:
        """What the cache holds, decoded; None before the first token."""
        return self._read(self.k) if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._read(self.v) if self.is_initialized else None

    def _read(self, side: Side) -> torch.Tensor:
        read = side.read(self.dtype)
        wide = side.first is not None or side.last is not None
        read.kept = Kept(side.codec, side.rows, wide, self.q_scale)  # type: ignore[attr-defined]
        return read

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype = key_states.dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens [batch, heads, tokens, dim] and give back all, decoded to their dtype."""
        self.dtype = key_states.dtype
        self.k.add(key_states)
        self.v.add(value_states)
        return self._read(self.k), self._read(self.v)

    def get_seq_length(self) -> int:
        return self.k.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.k.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget tokens from the end; transformers counts them as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number of tokens to remove")
        self.k.drop(-tokens_to_remove)
        self.v.drop(-tokens_to_remove)

    def reset(self) -> None:
        self.crop(-self.k.tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.k.select(indices)
        self.v.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            batch = self.k.parts[0].shape[0]
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    def offload(self) -> None:
        """Rows are in memory already."""

    def prefetch(self) -> None:
        """As ``offload``."""
