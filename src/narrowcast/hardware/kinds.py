"""What a linear layer is to an engine: the kind of its weight and of its input, by small predicates in order.

Engines choose a kernel by the element format, what shares a scale, the scale's own format, and how the input is
quantized; nothing else of a scheme matters to them. The first kind that fits is the one.

    fp8_channel × fp8_token     int4 × wide     nvfp4 × nvfp4     mxfp4 × fp8_group
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from narrowcast.numbers.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, E8M0, INT4, INT8, Kind, formats
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, integer

Test = Callable[[Scheme], bool]
_BNB_FP4 = formats["bnb_fp4"]


def _tensor(scheme: Scheme) -> bool:
    return scheme.inner.tile == (0, 0)


def _row(scheme: Scheme) -> bool:
    return scheme.inner.tile == (1, 0)


def _group(scheme: Scheme) -> bool:
    return scheme.inner.tile[0] == 1 and scheme.group > 0


def _mx(scheme: Scheme) -> bool:
    return scheme.inner.format is E8M0 and scheme.inner.tile == (1, 32)


def _fp8(scheme: Scheme) -> bool:
    return scheme.element is E4M3FN and not _mx(scheme)


def _two_levels(scheme: Scheme) -> bool:
    return scheme.element is E2M1 and scheme.inner.tile == (1, 16) and scheme.inner.format is E4M3FN


WEIGHTS: tuple[tuple[str, Test], ...] = (
    ("nvfp4", lambda s: _two_levels(s) and len(s.scales) == 2),
    ("mxfp4", lambda s: s.element is E2M1 and _mx(s)),
    ("mxfp6_e2m3", lambda s: s.element is E2M3 and _mx(s)),
    ("mxfp6_e3m2", lambda s: s.element is E3M2 and _mx(s)),
    ("mxfp8", lambda s: s.element is E4M3FN and _mx(s)),
    ("fp8_tensor", lambda s: _fp8(s) and _tensor(s)),
    ("fp8_channel", lambda s: _fp8(s) and _row(s)),
    ("fp8_block128", lambda s: _fp8(s) and s.inner.tile == (128, 128)),
    ("fp8_block", lambda s: _fp8(s) and s.inner.tile[0] > 1 and s.group > 0),
    ("fp8_group", lambda s: _fp8(s) and _group(s)),
    ("int8_tensor", lambda s: s.element is INT8 and s.zero is None and _tensor(s)),
    ("int8_channel", lambda s: s.element is INT8 and s.zero is None and _row(s)),
    ("int8_group", lambda s: s.element is INT8 and s.zero is None and _group(s)),
    ("int4", lambda s: s.element is INT4 and s.zero is None and s.inner.tile[0] == 1),
    ("uint4", lambda s: integer(s) and s.element.bits == 4 and s.zero is not None and s.inner.tile[0] == 1),
    ("uint8", lambda s: integer(s) and s.element.bits == 8 and s.zero is not None and s.inner.tile[0] == 1),
    (
        "int_odd",
        lambda s: integer(s) and s.element.bits not in (4, 8) and s.zero is None and s.inner.tile[0] == 1,
    ),
    ("uint_odd", lambda s: integer(s) and s.element.bits not in (4, 8) and s.inner.tile[0] == 1),
    ("nf4", lambda s: s.element.kind is Kind.TABLE and s.element is not _BNB_FP4),
    ("bnb_fp4", lambda s: s.element is _BNB_FP4),
    ("fp8_e5m2", lambda s: s.element is E5M2),
    ("fp8_fnuz", lambda s: s.element.name == "e4m3fnuz"),
)

INPUTS: tuple[tuple[str, Test], ...] = (
    ("nvfp4", _two_levels),
    ("mxfp4", lambda s: s.element is E2M1 and _mx(s)),
    ("mxfp6", lambda s: s.element in (E2M3, E3M2) and _mx(s)),
    ("mxfp8", lambda s: s.element is E4M3FN and _mx(s)),
    ("fp8_tensor", lambda s: _fp8(s) and _tensor(s)),
    ("fp8_token", lambda s: _fp8(s) and _row(s)),
    ("fp8_group", lambda s: _fp8(s) and _group(s)),
    ("int8_tensor", lambda s: integer(s) and s.element.bits == 8 and _tensor(s)),
    ("int8_token", lambda s: integer(s) and s.element.bits == 8 and s.inner.tile[0] == 1),
)
WIDE = "wide"


def weight_kind(scheme: Scheme) -> str:
    """The kind of a weight's scheme, or "other"."""
    return next((name for name, fits in WEIGHTS if fits(scheme)), "other")


@cache
def input_kind(linear: LinearScheme) -> str:
    """The kind of a layer's input: "wide" where it is not quantized, "other" where no kind fits. A scale per tensor
    that is stored is ``fp8_static`` or ``int8_static``; one made on the fly is ``fp8_tensor`` or ``int8_tensor``."""
    if linear.input is None:
        return WIDE
    found = next((name for name, fits in INPUTS if fits(linear.input)), "other")
    return found.replace("_tensor", "_static") if linear.calibrated else found
