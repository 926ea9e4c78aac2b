"""A model as an engine would load it: groups of equal matrices, each with its scheme, its spelling and its bytes.

    from a config      the family's geometry; a preset says what becomes of its linear layers
    from headers       the matrices that are there, as their container reads them; the config says the rest

    bytes(group) = Σ bits_per_weight · N · K / 8   scales, zero points and outer scales included

Both give the same kind of answer, so that a plan can be made before a checkpoint exists and checked when it does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowcast.model.geometry import Geometry, Matrix
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import BF16, Format
from narrowcast.tensors.presets import LinearScheme

TOWERS = frozenset({Role.VISION, Role.AUDIO, Role.MTP})  # what a step of the text model does not read


@dataclass(frozen=True)
class Group:
    """Equal matrices stored alike. ``linear`` None: plain floats of ``dtype``, or what ``format`` says where that is no
    scheme of ours. ``format`` is the container's own word for the layer; ``nbytes`` everything stored for it, of all
    layers and experts."""

    matrix: Matrix
    linear: LinearScheme | None
    nbytes: int
    dtype: Format = BF16
    format: str | None = None

    @property
    def scheme(self) -> str:
        """The weight's scheme by name, or the dtype's."""
        if self.linear is None:
            return self.format or self.dtype.name
        return str(self.linear.weight.name)

    @property
    def bits(self) -> float:
        """Stored bits per parameter."""
        return 8 * self.nbytes / self.matrix.parameters

    def held_in(self, linear: LinearScheme | None, dtype: Format | None = None) -> Group:
        """The same matrices in a scheme (None: plain floats) whatever they are in now, by its bits alone: no container
        adds or leaves out anything. ``dtype`` is that of floats and biases (None: as it is)."""
        matrix, wide = self.matrix, dtype or self.dtype
        n, k = matrix.shape
        bits = wide.bits if linear is None else linear.weight.bits_per_weight((n, k))
        each = round(bits * n * k / 8) + matrix.bias * wide.bits // 8
        return replace(
            self, linear=linear, nbytes=matrix.layers * matrix.experts * each, dtype=wide, format=None
        )


@dataclass(frozen=True)
class Served:
    """``origin`` says what was read: "headers" or "config". ``container`` is the checkpoint's own, or the one that a
    preset would be written to ("plain" without). ``kv`` is the cache that the checkpoint asks for, a name in
    ``CACHE_MODES`` (None: none), and ``kv_scales`` whether it brings scales for it. ``vector_bytes`` is all that is in
    no group, ``tower_bytes`` the same of vision and audio towers and MTP layers."""

    name: str
    geometry: Geometry
    container: str
    groups: tuple[Group, ...]
    vector_bytes: int
    origin: str
    preset: str | None = None
    kv: str | None = None
    kv_scales: bool = False
    notes: tuple[str, ...] = ()
    tower_bytes: int = 0

    @property
    def quantized(self) -> bool:
        """Whether any layer is in a scheme."""
        return any(group.linear is not None for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.vector_bytes + self.tower_bytes + sum(group.nbytes for group in self.groups)
