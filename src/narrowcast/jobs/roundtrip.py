"""Send numbers through formats and schemes and back, and measure what is lost.

A source is a distribution with a seed, an array on disk, or a tensor of a checkpoint:

    randn:4096   laplace:4096   student5:4096x1024    N(0, 1), Laplace(0, 1), Student-t(5)
    FILE.npy     CHECKPOINT:TENSOR                    as float32 matrices; leading axes become rows

A format alone is a scheme whose only scale is 1. A scheme is tried under each scale rule and span asked for
that applies to it, and under its own where none applies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.opening import open_model
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import encode, round_values, widen
from narrowcast.numbers.formats import FP32, Format, Kind, formats
from narrowcast.tensors.metrics import Errors, error_report
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import OUTER_RULES, POWER_RULES, check_finite, under_rule
from narrowcast.tensors.schemes import Scale, Scheme, Shape

F32 = NDArray[np.float32]
_DRAWN = re.compile(r"(randn|laplace|student5):(\d+(?:x\d+)*)")
FORMATS = ("bf16", "fp16", "e5m2", "e4m3fn", "int8", "e2m1")
SCHEMES = ("fp8_channel", "int8_channel", "mxfp8", "mxfp6", "int4_g128", "mxfp4", "nvfp4")
LARGEST = 1 << 27  # elements; the numpy definition holds a dozen float64 copies


@dataclass(frozen=True)
class Trip:
    """One way through a format or scheme: its name, what varies, bits per element with metadata, the losses.

    Relative errors are over nonzero elements; ``saturated`` counts elements on the largest code.
    """

    name: str
    rule: str
    span: float
    bits: float
    errors: Errors
    max_relative_error: float
    mean_relative_error: float
    saturated: int

    @property
    def relative_mse(self) -> float:
        """Noise over signal: 10^(-SQNR / 10)."""
        return self.errors.noise / (self.errors.signal or 1.0)


def roundtrip(
    x: F32, format_names: Sequence[str], trial_schemes: Sequence[Scheme], source: Format = FP32
) -> list[Trip]:
    """Every format, then every scheme, over float32 x [N, K]; ``source`` is the dtype that x came in."""
    check_finite(x, "the source")
    return [_through_format(x, formats[n]) for n in format_names] + [
        _through_scheme(x, s, source) for s in trial_schemes
    ]


def _through_scheme(x: F32, scheme: Scheme, source: Format) -> Trip:
    q = quantize(x, scheme, source=source, where="the source")
    return _trip(x, q, scheme.name, scheme.scales[-1].rule, scheme.bits_per_weight(x.shape))


def _trip(x: F32, q: QTensor, name: str, rule: str, bits: float) -> Trip:
    found = error_report(x, q)
    return Trip(
        name,
        rule,
        q.scheme.span,
        bits,
        found.errors,
        found.max_relative_error,
        found.mean_relative_error,
        found.saturated,
    )


def _through_format(x: F32, fmt: Format) -> Trip:
    if fmt.coded:
        alone = Scheme(fmt.name, fmt, (Scale(FP32, (0, 0), "amax"),))
        q = QTensor(alone, encode(x, fmt).codes, (np.ones((1, 1), np.float32),))
        return _trip(x, q, fmt.name, "-", fmt.bits)
    wide = x.astype(np.float64)
    rounded = np.clip(round_values(wide, fmt), -fmt.max, fmt.max)
    difference = np.abs(rounded - wide)
    nonzero = wide != 0
    relative = difference[nonzero] / np.abs(wide[nonzero])
    lost = int(((rounded == 0) & nonzero).sum())
    total = Errors(x.size, float(np.square(wide).sum()), float(np.square(difference).sum()), 0, lost)
    mean = float(relative.mean()) if relative.size else 0.0
    return Trip(fmt.name, "-", fmt.max, fmt.bits, total, float(relative.max(initial=0.0)), mean, 0)


def variants(scheme: Scheme, rules: Sequence[str], spans: Sequence[float]) -> list[Scheme]:
    """``scheme`` under each rule and span that applies to it; itself where none does."""
    ruled = [changed for rule in rules if (changed := _ruled(scheme, rule)) is not None] or [scheme]
    if not spans or scheme.element.kind is not Kind.INT:
        return ruled
    return [replace(s, scales=(replace(s.inner, span=span), *s.scales[1:])) for s in ruled for span in spans]


def check_rules(trial_schemes: Sequence[Scheme], rules: Sequence[str], spans: Sequence[float]) -> None:
    """Refuse a rule or span that applies to none of the schemes: it would be ignored in silence."""
    for rule in rules:
        if not any(_ruled(scheme, rule) for scheme in trial_schemes):
            wanted = f"{', '.join(OUTER_RULES)} for nvfp4; {', '.join(POWER_RULES)} for e8m0 scales"
            raise UsageError("no scheme here takes this rule", got=rule, wanted=wanted)
    if any(not 0 < span < inf for span in spans):
        raise UsageError("a span is a positive number", got=", ".join(map(str, spans)))
    if spans and not any(scheme.element.kind is Kind.INT for scheme in trial_schemes):
        raise UsageError(
            "a span is for integer schemes, and there is none here", remedy="name one, such as int8_channel"
        )


def _ruled(scheme: Scheme, rule: str) -> Scheme | None:
    """The scheme under ``rule``, on the level that the rule is for; None where it is for none."""
    try:
        return under_rule(scheme, rule)
    except UsageError:
        return None


def load_source(text: str, seed: int = 0) -> tuple[F32, Format]:
    """The float32 matrix that a source names, and the dtype it came in; see the module docstring."""
    drawn = _DRAWN.fullmatch(text)
    if drawn:
        sizes = [int(part) for part in drawn[2].split("x")]
        return draw(drawn[1], (1, *sizes) if len(sizes) == 1 else tuple(sizes), seed), FP32
    if text.endswith(".npy"):
        return _from_npy(Path(text))
    model, colon, tensor = text.rpartition(":")
    if colon and model:
        return _from_checkpoint(model, tensor)
    wanted = "randn:N, laplace:N or student5:N (N or RxC), FILE.npy, or CHECKPOINT:TENSOR"
    raise UsageError("not a source of numbers", got=text, wanted=wanted)


def draw(kind: str, shape: Shape, seed: int) -> F32:
    """Seeded float32 samples of a distribution."""
    count = int(np.prod(shape, dtype=np.float64))
    if not 0 < count <= LARGEST:
        raise UsageError("too many samples, or none", got=count, wanted=f"1 to {LARGEST}")
    rng = np.random.default_rng(seed)
    drawn: dict[str, Any] = {
        "randn": rng.standard_normal,
        "laplace": lambda n: rng.laplace(size=n),
        "student5": lambda n: rng.standard_t(5, n),
    }
    x: F32 = drawn[kind](count).astype(np.float32).reshape(shape)
    return _matrix(x, kind)


def _from_npy(path: Path) -> tuple[F32, Format]:
    try:
        stored = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UsageError("no such file", where=path) from None
    except (OSError, ValueError, EOFError) as error:
        raise InputError("the file cannot be read as a numpy array", where=path, got=error) from None
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "fiu":
        raise InputError(
            "not an array of numbers", where=path, got=getattr(stored, "dtype", type(stored).__name__)
        )
    source = formats["fp16"] if stored.dtype == np.float16 else FP32
    with np.errstate(over="ignore"):
        return _matrix(stored.astype(np.float32), str(path)), source


def _from_checkpoint(model: str, tensor: str) -> tuple[F32, Format]:
    with open_model(model) as checkpoint:
        entry = checkpoint.entry(tensor)
        if entry.dtype.packed or entry.dtype.format is None:
            wanted = "a tensor of floats or 8-bit codes"
            raise InputError(
                "cannot read this dtype as numbers", where=tensor, got=entry.dtype.name, wanted=wanted
            )
        source = formats[entry.dtype.format]
        stored = np.array(checkpoint.array(tensor))
    if stored.dtype == np.int8:
        return _matrix(stored.astype(np.float32), tensor), source
    return _matrix(widen(stored, source), tensor), source


def _matrix(x: F32, where: str) -> F32:
    if x.size == 0:
        raise InputError("an empty array", where=where, got=f"shape {list(x.shape)}")
    return np.ascontiguousarray(x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1))
