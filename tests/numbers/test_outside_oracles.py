"""Rung 4: the codec against ml_dtypes, torch, gfloat and compressed-tensors, over every 16-bit input.

What differs is known: oracle_differences.csv lists oracle, version, format, inputs, mode and the exact number of
inputs that differ, with the reason. A count that changes either way fails, as does a row that nothing uses.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.fp6_utils import cast_to_fp6
from gfloat import RoundMode, decode_ndarray, encode_ndarray, round_ndarray
from gfloat import formats as gformats
from numpy.typing import NDArray
from packaging.version import Version

from narrowcast.numbers.codec import decode_table, encode, round_values
from narrowcast.numbers.formats import Format, formats
from reference.critical_points import critical_points, sixteen_bit_inputs
from reference.fractions_oracle import LAYOUTS

REGISTER = Path(__file__).with_name("oracle_differences.csv")
ML_DTYPES = {
    "bf16": "bfloat16", "e5m2": "float8_e5m2", "e5m2fnuz": "float8_e5m2fnuz", "e4m3fn": "float8_e4m3fn",
    "e4m3_ieee": "float8_e4m3", "e4m3fnuz": "float8_e4m3fnuz", "e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e3m4": "float8_e3m4", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
}  # fmt: skip
ML_INTEGERS = ("int4", "uint4", "int2", "uint2")
TORCH = {
    "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz, "e8m0": torch.float8_e8m0fnu, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
GFLOAT = {
    "bf16": gformats.format_info_bfloat16, "fp16": gformats.format_info_binary16,
    "e5m2": gformats.format_info_ocp_e5m2, "e4m3fn": gformats.format_info_ocp_e4m3,
    "e2m3": gformats.format_info_ocp_e2m3, "e3m2": gformats.format_info_ocp_e3m2,
    "e2m1": gformats.format_info_ocp_e2m1, "e8m0": gformats.format_info_ocp_e8m0,
    "mxint8": gformats.format_info_ocp_int8, "binary8p3": gformats.format_info_p3109(8, 3),
    "binary8p4": gformats.format_info_p3109(8, 4),
}  # fmt: skip
GFLOAT_ROUNDINGS = {
    "nearest_even": RoundMode.TiesToEven, "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero, "up": RoundMode.TowardPositive, "down": RoundMode.TowardNegative,
}  # fmt: skip
INPUTS = ("bf16", "fp16", "points32", "points64")


def register() -> list[dict[str, str]]:
    with REGISTER.open(newline="") as file:
        return list(csv.DictReader(file))


def expected(oracle: str, fmt: str, inputs: str, mode: str) -> int:
    """How many inputs are known to differ between this oracle's installed version and us."""
    installed = Version(version(oracle)).release
    count = 0
    for row in register():
        known = (row["oracle"], row["format"], row["inputs"], row["mode"]) == (oracle, fmt, inputs, mode)
        since, before = Version(row["since"]).release, row["before"]
        if known and since <= installed and (not before or installed < Version(before).release):
            count += int(row["count"])
    return count


@cache
def inputs_of(name: str, kind: str) -> NDArray[np.float64]:
    """Float64 inputs; kind is one of INPUTS, for E8M0 with a part of the line behind a blank."""
    kind, _, part = kind.partition(" ")
    if kind.startswith("points"):
        x = critical_points(LAYOUTS[name])[:: 1 if LAYOUTS[name].bits <= 8 else 37]
        with np.errstate(over="ignore"):
            x = x[x.astype(np.float32) == x] if kind == "points32" else x
    else:
        x = sixteen_bit_inputs(kind)
    x = x if formats[name].has_nan else x[~np.isnan(x)]
    parts = {"": x == x, "normal": x >= 2.0**-126, "subnormal": (x > 0) & (x < 2.0**-126), "below": x <= 0}
    return x if not part else x[parts[part]]


def kinds_of(name: str) -> list[str]:
    if name != "e8m0":
        return list(INPUTS)
    return [f"{kind} {part}" for kind in INPUTS[:3] for part in ("normal", "subnormal", "below")]


def report(
    name: str, x: NDArray[np.float64], theirs: NDArray[Any], ours: NDArray[Any], wrong: NDArray[Any]
) -> str:
    lines = [f"{wrong.sum()} of {len(x)} differ; x: theirs, ours"]
    lines += [f"{float(x[i])!r}: {theirs[i]}, {ours[i]}" for i in np.flatnonzero(wrong)[:5]]
    return f"{name}: " + "\n".join(lines)


def same_values(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Equal values with equal signs of zero; any NaN equals any NaN."""
    return ((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))


def carrier(fmt: Format) -> Any:
    return np.uint8 if fmt.bits <= 8 else np.uint16


CASES = [(name, kind) for name in ML_DTYPES for kind in kinds_of(name)]


@pytest.mark.parametrize(("name", "kind"), CASES)
@np.errstate(over="ignore", invalid="ignore")
def test_ml_dtypes_casts(name: str, kind: str) -> None:
    """Bit for bit, NaN codes included; ml_dtypes overflows to the special value where there is one."""
    fmt, x = formats[name], inputs_of(name, kind)
    given = x if kind == "points64" else x.astype(np.float32)
    theirs = given.astype(getattr(ml_dtypes, ML_DTYPES[name])).view(carrier(fmt))
    ours = encode(x, fmt, overflow="special" if fmt.has_nan else "saturate").codes
    wrong = theirs != ours
    assert wrong.sum() == expected("ml_dtypes", name, kind, "cast"), report(name, x, theirs, ours, wrong)


@pytest.mark.parametrize("name", [*ML_DTYPES, *ML_INTEGERS])
def test_ml_dtypes_decodes(name: str) -> None:
    fmt = formats[name]
    codes = np.arange(1 << fmt.bits).astype(carrier(fmt))
    theirs = codes.view(getattr(ml_dtypes, ML_DTYPES.get(name, name))).astype(np.float64)
    assert same_values(theirs, decode_table(fmt)).all()


@pytest.mark.parametrize("name", ML_INTEGERS)
def test_ml_dtypes_integers_truncate_in_range(name: str) -> None:
    """Integer casts of ml_dtypes drop the fraction and wrap; within the range that is rounding toward zero."""
    fmt = formats[name]
    x = sixteen_bit_inputs("fp16")
    x = x[(x > fmt.min - 1) & (x < fmt.max + 1)]
    theirs = x.astype(np.float32).astype(getattr(ml_dtypes, name)).astype(np.int64)
    assert np.array_equal(theirs, decode_table(fmt)[encode(x, fmt, "toward_zero").codes])


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in TORCH for kind in kinds_of(name)])
def test_torch_casts(name: str, kind: str) -> None:
    """As values, since which NaN comes out depends on the vector width. E4M3FN saturates since torch 2.12."""
    fmt, x = formats[name], inputs_of(name, kind)
    dtype = torch.float64 if kind == "points64" else torch.float32
    bits = torch.uint8 if fmt.bits == 8 else torch.uint16
    theirs = decode_table(fmt)[torch.from_numpy(x.copy()).to(dtype).to(TORCH[name]).view(bits).numpy()]
    ours = decode_table(fmt)[encode(x, fmt, overflow="saturate" if name == "e4m3fn" else "special").codes]
    wrong = ~same_values(theirs, ours)
    assert wrong.sum() == expected("torch", name, kind, "cast"), report(name, x, theirs, ours, wrong)


@pytest.mark.parametrize("name", TORCH)
def test_torch_decodes(name: str) -> None:
    fmt = formats[name]
    codes = torch.from_numpy(np.arange(1 << fmt.bits).astype(carrier(fmt))).view(TORCH[name])
    for dtype in (torch.float32, torch.float64):
        assert same_values(codes.to(dtype).double().numpy(), decode_table(fmt)).all()


@np.errstate(over="ignore")  # gfloat, on the far ends
@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_rounds_and_encodes(name: str) -> None:
    """Five roundings, saturating and not. E8M0 only from its smallest value up: gfloat rounds below it as well."""
    fmt, info, table = formats[name], GFLOAT[name], decode_table(formats[name])
    for kind, (rounding, mode), saturate in itertools.product(
        INPUTS, GFLOAT_ROUNDINGS.items(), (True, False)
    ):
        if not saturate and not fmt.has_nan:
            continue
        x = inputs_of(name, kind)[:: 1 if kind.startswith("points") or rounding == "nearest_even" else 5]
        x = x[x >= fmt.min] if name == "e8m0" else x
        theirs = round_ndarray(info, x, mode, saturate)
        codes = encode(x, fmt, rounding, "saturate" if saturate else "special").codes  # type: ignore[arg-type]
        wrong = ~same_values(theirs, table[codes])
        assert not wrong.any(), f"{rounding} " + report(name, x, theirs, table[codes], wrong)
        number = ~np.isnan(theirs)
        assert np.array_equal(encode_ndarray(info, theirs)[number], codes[number])


@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_decodes(name: str) -> None:
    theirs = decode_ndarray(GFLOAT[name], np.arange(1 << formats[name].bits))
    assert same_values(theirs, decode_table(formats[name])).all()


@np.errstate(over="ignore")  # gfloat, on the far ends
@pytest.mark.parametrize("rounding", GFLOAT_ROUNDINGS)
def test_gfloat_binary32(rounding: str) -> None:
    """Value rounding to fp32 around fp32 numbers, their midpoints, the subnormals and the overflow threshold."""
    rng = np.random.default_rng(32)
    bits = np.concatenate([rng.integers(0, 0x7F800000, 4000), np.arange(64), 0x7F7FFFFF - np.arange(64)])
    low = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(low, 1e-300))), -126) - 23)
    x = np.concatenate([low + share * step for share in (0, 0.25, 0.5, 0.75, 1)])
    x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf), [np.inf, np.nan, 0.0]])
    x = np.concatenate([x, -x])
    theirs = round_ndarray(gformats.format_info_binary32, x, GFLOAT_ROUNDINGS[rounding], False)
    assert same_values(theirs, round_values(x, formats["fp32"], rounding)).all()  # type: ignore[arg-type]


def test_gfloat_e8m0_below_its_range() -> None:
    x = inputs_of("e8m0", "bf16")
    theirs = round_ndarray(GFLOAT["e8m0"], x, RoundMode.TiesToEven, True)
    ours = decode_table(formats["e8m0"])[encode(x, formats["e8m0"]).codes]
    wrong = ~same_values(theirs, ours)
    assert wrong.sum() == expected("gfloat", "e8m0", "bf16", "saturate"), report(
        "e8m0", x, theirs, ours, wrong
    )


@pytest.mark.parametrize("name", ["e4m3fn", "e2m1", "e3m2", "binary8p3"])
def test_gfloat_stochastic_rounding(name: str) -> None:
    """gfloat rounds away when delta + s·2^-n ≥ 1; on multiples of 2^-n that is delta > (2^n - s - 1)·2^-n."""
    fmt = formats[name]
    x = sixteen_bit_inputs("bf16")
    x = x[(x >= (fmt.smallest_normal or 0)) & (x <= fmt.max)]
    bits = np.random.default_rng(8).integers(0, 256, len(x))
    theirs = round_ndarray(GFLOAT[name], x, RoundMode.StochasticFastest, True, bits, 8)
    ours = encode(x, fmt, "stochastic", noise=(255 - bits) / 256).codes
    assert np.array_equal(theirs, decode_table(fmt)[ours])


def p3109_spellings() -> list[tuple[str, Any]]:
    """P3109 formats that a spelling reaches: signed extended and finite, unsigned finite."""
    found: list[tuple[str, Any]] = []
    signed, unsigned = gformats.Signedness.Signed, gformats.Signedness.Unsigned
    extended, finite = gformats.Domain.Extended, gformats.Domain.Finite
    for k in range(3, 12):
        for p in range(1, k):
            e, m = k - p, p - 1
            bias = 2 ** (k - p - 1)
            if 1 <= e <= 7 and (e, m) != (1, 0):
                found.append(
                    (f"e{e}m{m}:bias={bias},extended", gformats.format_info_p3109(k, p, signed, extended))
                )
                found.append((f"e{e}m{m}:bias={bias},fnuz", gformats.format_info_p3109(k, p, signed, finite)))
            if 1 <= e + 1 <= 7:
                info = gformats.format_info_p3109(k, p, unsigned, finite)
                found.append((f"ue{e + 1}m{m}:bias={2 * bias},fn", info))
    return found


@pytest.mark.parametrize(("text", "info"), p3109_spellings(), ids=lambda value: str(value))
def test_p3109_formats_by_spelling(text: str, info: Any) -> None:
    fmt, table = formats[text], decode_table(formats[text])
    assert (fmt.bits, fmt.max) == (info.k, info.max)
    assert same_values(decode_ndarray(info, np.arange(1 << fmt.bits)), table).all()
    x = sixteen_bit_inputs("fp16")[::29]
    x = x[x >= 0] if not fmt.signed else x
    for rounding, mode in GFLOAT_ROUNDINGS.items():
        theirs = round_ndarray(info, x, mode, True)
        ours = table[encode(x, fmt, rounding).codes]  # type: ignore[arg-type]
        assert same_values(theirs, ours).all(), rounding


CT_CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"e2m1": cast_to_fp4, "e2m3": cast_to_fp6}


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(CT_CASTS, INPUTS)))
def test_compressed_tensors_casts(name: str, kind: str) -> None:
    x = inputs_of(name, kind)
    dtype = torch.float64 if kind == "points64" else torch.float32
    theirs = CT_CASTS[name](torch.from_numpy(x.copy()).to(dtype)).double().numpy()
    ours = decode_table(formats[name])[encode(x, formats[name]).codes]
    wrong = ~same_values(theirs, ours)
    known = expected("compressed-tensors", name, kind, "cast")
    assert wrong.sum() == known, report(name, x, theirs, ours, wrong)


def test_every_row_of_the_register_is_used() -> None:
    cases = {("ml_dtypes", name, kind, "cast") for name, kind in CASES}
    cases |= {("torch", name, kind, "cast") for name in TORCH for kind in kinds_of(name)}
    cases |= {("compressed-tensors", name, kind, "cast") for name in CT_CASTS for kind in INPUTS}
    cases |= {("gfloat", "e8m0", "bf16", "saturate")}
    for row in register():
        assert (row["oracle"], row["format"], row["inputs"], row["mode"]) in cases, row
        assert int(row["count"]) > 0
        assert len(row["what"]) > 20, row
