"""Caches for a model: the same mode in every attention layer, but for those that are told to stay wide.

    make = CacheFactory(model.config, "fp8_e4m3", scales);   model.generate(..., cache=make());   make.seen

Layers that hold no keys and values (state-space layers, layers that reuse another's) are transformers' own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs

from narrowcast.errors import UsageError
from narrowcast.runtime.caches.layer import CodedLayer, LayerSeen, Side
from narrowcast.runtime.caches.modes import CacheMode, cache_mode
from narrowcast.runtime.caches.scales import UNITY, KVScales, scale_of

SLIDING = "sliding_window"
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


class CodedCache(Cache):
    """A transformers Cache whose layers are encoded; ``mode`` None: none of them is."""

    def __init__(self, mode: CacheMode | None, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.mode = mode

    @property
    def coded(self) -> list[CodedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CodedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory, tokens that are kept wide included."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.coded)


class CacheFactory:
    """Makes empty caches of one kind, and notes in ``seen``, by layer, what went into all of them."""

    def __init__(
        self,
        config: Any,
        mode: str | None,
        scales: KVScales | None = None,
        *,
        skip_layers: Collection[int | str] = (),
        keep_first: int = 0,
        keep_last: int = 0,
    ) -> None:
        """``config`` is the model's; ``skip_layers`` are indices of layers that stay wide, or "sliding_window" for all
        that have one, as vLLM takes them; ``keep_first`` and ``keep_last`` tokens stay wide in the others.

        Raises UsageError for an unknown mode, a head size that the mode does not take, layers that do not exist, and
        scales that do not fit the mode; InputError for scales that are no positive numbers.
        """
        self.config = config.get_text_config(decoder=True)
        self.mode = None if mode is None else cache_mode(mode)
        self.scales = scales or UNITY
        self.keep_first, self.keep_last = keep_first, keep_last
        self.types, self.arguments = get_layer_types_and_kwargs(self.config)
        sliding = {i for i, kind in enumerate(self.types) if kind == "sliding_attention"}
        named = sliding if SLIDING in skip_layers else set()
        self.skip = named | (set(skip_layers) - {SLIDING})
        strange = self.skip - set(range(len(self.types)))
        if strange:
            wanted = f"0 to {len(self.types) - 1}, or {SLIDING}"
            raise UsageError("no such layer to keep wide", got=sorted(map(str, strange)), wanted=wanted)
        if min(keep_first, keep_last) < 0:
            raise UsageError("a number of tokens to keep", got=min(keep_first, keep_last), wanted="0 or more")
        self.seen: dict[int, LayerSeen] = {}
        self._check_scales()

    def _check_scales(self) -> None:
        if self.mode is None:
            return
        for side in ("k", "v"):
            for layer in getattr(self.scales, side):
                found = scale_of(getattr(self.scales, side), layer, side)
                if found.numel() > 1 and self.mode.scales != "head":
                    raise UsageError(
                        "this mode has one scale for all heads",
                        where=f"{self.mode.name}, {side}_scale of layer {layer}",
                        got=f"{found.numel()} scales",
                        wanted="one",
                        remedy="use fp8_head",
                    )

    def __call__(self) -> CodedCache:
        return CodedCache(self.mode, [self._layer(i) for i in range(len(self.types))])

    def _layer(self, i: int) -> Any:
        if self.types[i] not in ATTENTION:
            return DYNAMIC_LAYER_TYPE_MAPPING[self.types[i]](**self.arguments[i])
        seen = self.seen.setdefault(i, LayerSeen())
        k, v = scale_of(self.scales.k, i, "k"), scale_of(self.scales.v, i, "v")
        q = scale_of(self.scales.q, i, "q") if i in self.scales.q else k
        if self.mode is None or i in self.skip:
            return CodedLayer(Side(None, k, seen.k), Side(None, v, seen.v), q)
        keep = self.keep_first, self.keep_last
        return CodedLayer(Side(self.mode, k, seen.k, *keep), Side(self.mode, v, seen.v, *keep), q)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers, once the caches have seen one; tokens kept wide are not counted."""
        return sum(seen.k.token_bytes + seen.v.token_bytes for seen in self.seen.values())
