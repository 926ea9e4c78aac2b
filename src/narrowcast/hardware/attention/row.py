"""The types of the attention tables: what a backend takes, what it multiplies in, and who is tried before whom.

    order   = GPUs × (heads | latents | sparse latents)  →  names, first come
    backend = GPUs × modes of the cache × head sizes      →  arithmetic | failure

A backend may have several rows, of which the first that fits is the one. One that is chosen and then raises has a
``failure``: the engine does not go on to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from narrowcast.hardware.engines.row import Reach
from narrowcast.hardware.gpus import GPU

Layout = Literal["heads", "latent", "sparse"]
WIDE = ("bf16",)
# Words of an engine for what rules a backend out.
CAPABILITY, MODE, HEAD, SINKS, SLIDING = (
    "compute capability not supported", "kv_cache_dtype not supported", "head_size not supported",
    "attention sinks not supported", "sliding window not supported",
)  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """``modes`` are names of ``CACHE_MODES``. ``arithmetic`` is that of both products, QKᵀ and PV, in a decode step;
    ``prefill`` where it differs there. Heads have one of the sizes in ``heads`` (none: any), ``least`` to ``most``, a
    multiple of ``multiple``. ``package`` is what has to be installed or set for it."""

    name: str
    reach: Reach
    modes: tuple[str, ...]
    arithmetic: str
    prefill: str | None = None
    heads: tuple[int, ...] = ()
    multiple: int = 1
    least: int = 1
    most: int = 1 << 16
    sinks: bool = True
    sliding: bool = True
    package: str = ""
    failure: str | None = None
    remedy: str | None = None
    notes: tuple[str, ...] = ()

    def lacks(self, gpu: GPU, mode: str, head_dim: int, sliding: bool, sinks: bool) -> list[str]:
        """What rules it out for such a layer, in the engine's words; nothing where it fits."""
        size = head_dim % self.multiple == 0 and self.least <= head_dim <= self.most
        checks = (
            (CAPABILITY, self.reach.holds(gpu)),
            (MODE, mode in self.modes),
            (HEAD, size and (not self.heads or head_dim in self.heads)),
            (SLIDING, self.sliding or not sliding),
            (SINKS, self.sinks or not sinks),
        )
        return [reason for reason, fits in checks if not fits]


@dataclass(frozen=True)
class Order:
    """Names of backends as an engine tries them on these GPUs. ``when`` limits it to quantized caches ("quantized") or
    wide ones ("wide"); none: any."""

    reach: Reach
    layout: Layout
    names: tuple[str, ...]
    when: str = ""


@dataclass(frozen=True)
class Attention:
    """An engine's tables. ``refusal`` is what it says where no backend is left, with {gpu} and {reasons}."""

    engine: str
    version: str
    source: str
    orders: tuple[Order, ...]
    backends: tuple[Backend, ...]
    refusal: str

    def rows(self, name: str) -> Sequence[Backend]:
        """The rows of one backend."""
        return [row for row in self.backends if row.name == name]
