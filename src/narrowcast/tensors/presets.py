"""Presets: the names people type, each a linear layer's computation, without any container in it.

A linear layer multiplies a quantized weight with an input that is kept wide (``...a16``), quantized on the fly
(dynamic) or quantized with a stored scale (static, which needs calibration). What must stay wide is part of the
preset: embeddings, the output head, norms, routers, biases, rotary tables, vision and audio towers, MTP layers.

A preset that needs calibration statistics refuses where there are none, and names the nearest that does not.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from narrowcast.errors import UsageError
from narrowcast.tensors.schemes import Scheme, schemes

EXCLUDED_ROLES = frozenset(
    {"embedding", "lm_head", "norm", "router", "bias", "rotary", "vision", "audio", "mtp"}
)  # fmt: skip
KV_SUFFIXES = ("kv8", "kv8_head", "kvnv4")
GROUPS = (128, 64, 32)  # sizes that a preset of groups falls back to, in this order


@dataclass(frozen=True)
class LinearScheme:
    """What a linear layer computes: weight scheme, input scheme (None keeps the input wide), whether the input's
    scales are made on the fly, and the accumulator. The output is the model's dtype."""

    weight: Scheme
    input: Scheme | None = None
    dynamic: bool = True
    accumulate: str = "fp32"

    @property
    def calibrated(self) -> bool:
        """Whether the input needs scales that only calibration data can give."""
        return self.input is not None and not self.dynamic


@dataclass(frozen=True)
class Preset:
    """A name, its aliases in other tools' spelling, the computation, and the nearest one without calibration."""

    name: str
    linear: LinearScheme
    aliases: tuple[str, ...] = ()
    kv: str | None = None
    nearest: str = ""
    excluded: frozenset[str] = EXCLUDED_ROLES

    @property
    def calibrated(self) -> bool:
        """Whether the preset needs statistics of activations."""
        return self.linear.calibrated or self.kv is not None

    def with_group(self, group: int) -> Preset:
        """The same preset on smaller groups, for layers whose width the group does not divide."""
        stem = self.linear.weight.name.rsplit("_g", 1)[0]
        return replace(self, linear=replace(self.linear, weight=schemes[f"{stem}_g{group}"]))

    def fitting(self, widths: Iterable[int]) -> Preset | None:
        """The same preset on the largest groups, its own or smaller ones, that divide all widths; None where none of
        ``GROUPS`` does. Tiles that belong to a format (NVFP4, MX), channels and blocks are no choice."""
        weight, asked = self.linear.weight, tuple(widths)
        if weight.group not in GROUPS or "_g" not in weight.name:
            return self
        for size in GROUPS:
            if size <= weight.group and not any(width % size for width in asked):
                return self if size == weight.group else self.with_group(size)
        return None


def _preset(name: str, weight: str, inputs: str | None = None, *aliases: str, **more: object) -> Preset:
    dynamic, nearest = bool(more.get("dynamic", True)), str(more.get("nearest", ""))
    accumulate = "int32" if inputs and inputs.startswith("int8") and weight.startswith("int") else "fp32"
    linear = LinearScheme(schemes[weight], schemes[inputs] if inputs else None, dynamic, accumulate)
    return Preset(name, linear, aliases, nearest=nearest)


ROWS: tuple[Preset, ...] = (
    _preset("fp8_dynamic", "fp8_channel", "fp8_token", "fp8_per_channel"),
    _preset("fp8_per_tensor", "fp8_tensor", "fp8_token"),
    _preset("fp8_block", "fp8_block128", "fp8_group128", "fp8_per_block"),
    _preset("fp8_block_ue8m0", "fp8_block128_ue8m0", "fp8_group128_ue8m0"),
    _preset("fp8", "fp8_tensor", "fp8_tensor", "fp8_static", dynamic=False, nearest="fp8_per_tensor"),
    _preset("int8", "int8_channel", "int8_token", "w8a8"),
    _preset("w8a16", "int8_g128"),
    _preset("w4a16", "int4_g128"),
    _preset("w4a16_asym", "uint4_g128"),
    _preset("w4a8", "int4_g128", "int8_token", "w4aint8"),
    _preset("w4afp8", "int4_g128", "fp8_token"),
    _preset("nvfp4", "nvfp4", "nvfp4", dynamic=False, nearest="nvfp4a16"),
    _preset("nvfp4a16", "nvfp4", None, "w4a16_nvfp4"),
    _preset("mxfp4", "mxfp4", "mxfp4"),
    _preset("mxfp4a16", "mxfp4"),
    _preset("mxfp4xfp8", "mxfp4", "fp8_group128"),
    _preset("mxfp6a16", "mxfp6"),
    _preset("mxfp6a8", "mxfp6", "mxfp8"),
    _preset("mxfp8", "mxfp8", "mxfp8"),
    _preset("mxfp8a16", "mxfp8"),
)


class Presets(Mapping[str, Preset]):
    """The rows by name and alias, case-insensitive, each optionally with ``+kv8``, ``+kv8_head`` or ``+kvnv4``."""

    def __init__(self, rows: tuple[Preset, ...]) -> None:
        self._rows = {row.name: row for row in rows}
        self._all = self._rows | {alias: row for row in rows for alias in row.aliases}

    def __getitem__(self, name: str) -> Preset:
        stem, _, kv = name.lower().replace("-", "_").partition("+")
        found = self._all.get(stem)
        if found is None:
            near = difflib.get_close_matches(stem, self._all, 3)
            remedy = (f"did you mean {', '.join(near)}? " if near else "") + "`narrowcast presets` lists them"
            raise UsageError("unknown preset", got=name, remedy=remedy)
        if not kv:
            return found
        if kv not in KV_SUFFIXES:
            raise UsageError(
                "unknown KV cache suffix", got=f"+{kv}", wanted=", ".join(f"+{s}" for s in KV_SUFFIXES)
            )
        return replace(found, name=f"{found.name}+{kv}", kv=kv, nearest=found.nearest or found.name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        stem, _, kv = name.lower().replace("-", "_").partition("+")
        return stem in self._all and (not kv or kv in KV_SUFFIXES)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


presets = Presets(ROWS)
