"""Rung 4: vLLM's scalar types (size, limits, specials), read from the file of its wheel without importing vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from narrowcast.numbers.formats import Kind, formats

NAMES = {
    "uint2": "uint2", "int4": "int4", "uint4": "uint4", "int8": "int8", "uint8": "uint8", "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu", "bf16": "bfloat16", "fp16": "float16",
    "e3m2": "float6_e3m2f", "e2m3": "float6_e2m3f", "e2m1": "float4_e2m1f",
}  # fmt: skip
# Known differences of vLLM 0.32, each asserted below so that its disappearance is noticed.
NO_LIMITS = {"e8m0": "max() and min() assume a sign and a mantissa"}


def scalar_type_file() -> Path | None:
    """vllm/scalar_type.py from NARROWCAST_VLLM_SCALAR_TYPE, the engine environment, or the running one."""
    given = os.environ.get("NARROWCAST_VLLM_SCALAR_TYPE")
    if given:
        return Path(given)
    engine = (Path(__file__).parents[2] / ".venv-engine" / "lib").glob("python3*/site-packages")
    candidates = (root / "vllm" / "scalar_type.py" for root in [*engine, *map(Path, sys.path)])
    return next((path for path in candidates if path.is_file()), None)


@pytest.fixture(scope="module")
def scalar_types() -> ModuleType:
    path = scalar_type_file()
    if path is None or not path.is_file():
        pytest.skip(
            "no vllm/scalar_type.py: make engine-test installs it, or name it by NARROWCAST_VLLM_SCALAR_TYPE"
        )
    spec = importlib.util.spec_from_file_location("vllm_scalar_type", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_size_limits_and_specials(name: str, scalar_types: ModuleType) -> None:
    fmt, theirs = formats[name], getattr(scalar_types.scalar_types, NAMES[name])
    assert theirs.size_bits == fmt.bits
    assert theirs.is_signed() == fmt.signed
    assert theirs.is_integer() == (fmt.kind is Kind.INT)
    if name in NO_LIMITS:
        with pytest.raises(Exception, match="too large"):
            theirs.max()
        with pytest.raises(AssertionError):
            theirs.min()
    else:
        assert (theirs.min(), theirs.max()) == (fmt.min, fmt.max)
    if fmt.kind is Kind.FLOAT:
        assert (theirs.exponent, theirs.mantissa) == (fmt.exponent_bits, fmt.mantissa_bits)
        assert theirs.has_infs() == fmt.has_inf
        assert (theirs.nan_repr.name != "NONE") == fmt.has_nan
    # has_nans() compares an enum with a number: it says yes for every type, integers and E2M1 included.
    assert theirs.has_nans() is True
