"""``import narrowcast``: what is exported, what arrays go in, what comes out, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import narrowcast
import toys
from narrowcast.errors import NonFiniteError, RangeError, UsageError
from narrowcast.kernels.reference.quantize import quantize as reference
from narrowcast.numbers.codec import to_bf16
from narrowcast.tensors.schemes import schemes

X = np.random.default_rng(0).standard_normal((48, 128)).astype(np.float32)


def test_all_is_what_is_meant_to_be_public() -> None:
    assert narrowcast.__all__ == [
        "__version__", "audit", "compare", "convert", "dequantize", "error_report", "errors", "fake_quantize",
        "formats", "plan", "presets", "quantize", "quantize_tensor", "recode", "schemes", "verdict",
    ]  # fmt: skip
    assert all(getattr(narrowcast, name) is not None for name in narrowcast.__all__)
    assert dir(narrowcast) == sorted(narrowcast.__all__)
    with pytest.raises(AttributeError, match="quantise"):
        narrowcast.quantise  # noqa: B018 - the attribute access is the test


def test_tables_are_looked_up_by_name() -> None:
    assert narrowcast.formats["e2m1"].max == 6
    assert narrowcast.schemes["mxfp8"].name == "mxfp8_e4m3"
    assert narrowcast.presets["FP8_DYNAMIC"].linear.weight.name == "fp8_channel"


@pytest.mark.parametrize("scheme", list(schemes))
def test_numpy_goes_through_the_definition(scheme: str) -> None:
    got, wanted = narrowcast.quantize_tensor(X, scheme), reference(X, schemes[scheme])
    assert np.array_equal(got.codes, wanted.codes)
    assert all(np.array_equal(a, b) for a, b in zip(got.scales, wanted.scales, strict=True))
    assert np.array_equal(narrowcast.dequantize(got), wanted.dequantize())


TORCH = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64,
         "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}  # fmt: skip


@pytest.mark.parametrize("name", list(TORCH))
def test_torch_and_numpy_of_the_same_dtype_agree(name: str) -> None:
    """Values go in unchanged: the same bits as numpy's (or ml_dtypes') array of the same dtype."""
    array = X.astype(TORCH[name])
    tensor = torch.from_numpy(X).to(getattr(torch, name))
    assert np.array_equal(tensor.to(torch.float64).numpy(), array.astype(np.float64))
    a, b = narrowcast.quantize_tensor(array, "nvfp4"), narrowcast.quantize_tensor(tensor, "nvfp4")
    assert np.array_equal(a.codes, b.codes)
    assert np.array_equal(a.scales[0], b.scales[0])
    assert np.array_equal(a.codes, reference(array.astype(np.float32), schemes["nvfp4"]).codes)


def test_torch_tensors_of_every_layout() -> None:
    wanted = narrowcast.quantize_tensor(np.ascontiguousarray(X.T), "mxfp4").codes
    assert np.array_equal(narrowcast.quantize_tensor(torch.from_numpy(X).T, "mxfp4").codes, wanted)
    parameter = torch.nn.Parameter(torch.from_numpy(X))
    assert np.array_equal(
        narrowcast.quantize_tensor(parameter, "mxfp4").codes, narrowcast.quantize_tensor(X, "mxfp4").codes
    )
    experts = np.stack([X, 2 * X])
    assert narrowcast.quantize_tensor(experts, "nvfp4").scales[1].shape == (2, 1, 1)


def test_dequantize_to_every_dtype() -> None:
    q = narrowcast.quantize_tensor(X, "int4_g32")
    exact = q.dequantize()
    assert np.array_equal(narrowcast.dequantize(q, np.float32), exact)
    assert np.array_equal(narrowcast.dequantize(q, "float16"), exact.astype(np.float16))
    assert np.array_equal(narrowcast.dequantize(q, "bf16"), to_bf16(exact))
    as_torch = narrowcast.dequantize(q, torch.bfloat16)
    assert as_torch.dtype is torch.bfloat16
    assert np.array_equal(as_torch.view(torch.int16).numpy().view(np.uint16), to_bf16(exact))
    with pytest.raises(UsageError, match="int8"):
        narrowcast.dequantize(q, "int8")


def test_error_report_of_a_scheme_and_of_a_qtensor_agree() -> None:
    by_name = narrowcast.error_report(X, "mxfp4")
    assert by_name == narrowcast.error_report(X, narrowcast.quantize_tensor(X, "mxfp4"))
    assert by_name == narrowcast.error_report(X, schemes["mxfp4"])
    assert 18 < by_name.sqnr < 20
    assert by_name.errors.elements == X.size
    with pytest.raises(UsageError, match="not what was quantized"):
        narrowcast.error_report(X[:8], narrowcast.quantize_tensor(X, "mxfp4"))


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((4, 4), np.int32), "not an array of floats"),
        (torch.zeros(4, 4, dtype=torch.int64), "not an array of floats"),
        (np.array([["a"]]), "not an array of floats"),
        (np.zeros(8), "matrices"),
        (np.float32(1), "matrices"),
    ],
)
def test_what_is_no_float_matrix_is_refused(array: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        narrowcast.quantize_tensor(array, "mxfp4")


def test_unknown_schemes_and_nan_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean mxfp4"):
        narrowcast.quantize_tensor(X, "mxpf4")
    bad = X.copy()
    bad[3, 7] = np.nan
    with pytest.raises(NonFiniteError, match=r"index \(3, 7\)"):
        narrowcast.quantize_tensor(torch.from_numpy(bad), "mxfp4")


def test_quantize_a_checkpoint(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m")
    result = narrowcast.quantize(model, tmp_path / "out", preset="FP8_DYNAMIC", ignore=["lm_head"])
    assert result.out == tmp_path / "out"
    assert (result.out / "model.safetensors").is_file()
    assert result.total.elements == sum(errors.elements for errors in result.roles.values()) > 0


def test_convert_and_compare_checkpoints(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m")
    narrowcast.quantize(model, tmp_path / "q", preset="NVFP4A16")
    assert narrowcast.convert(tmp_path / "q", tmp_path / "p", "plain").out == tmp_path / "p"
    assert narrowcast.compare(tmp_path / "q", tmp_path / "p").passed
    near = narrowcast.compare(model, tmp_path / "q", min_sqnr=18, only="re:.*mlp", workers=1)
    assert near.passed
    assert {tensor.role for tensor in near.tensors} == {"mlp"}


def test_numpy_users_never_import_torch() -> None:
    code = (
        "import sys, numpy as np, narrowcast\n"
        "x = np.ones((4, 32), np.float32)\n"
        "q = narrowcast.quantize_tensor(x, 'nvfp4'); narrowcast.dequantize(q); narrowcast.error_report(x, q)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_recode_moves_values_without_rounding() -> None:
    """FNUZ has FN's bits at half the value: scales double, and minus zero, whose bits are NaN there, loses its sign."""
    x = X.copy()
    x[0, 0] = -1e-12  # becomes minus zero
    fn = narrowcast.quantize_tensor(x, "fp8_channel")
    fnuz = narrowcast.recode(fn, "fp8_channel_fnuz")
    assert fn.codes[0, 0] == 0x80
    assert fnuz.codes[0, 0] == 0
    assert np.array_equal(np.delete(fn.codes, 0), np.delete(fnuz.codes, 0))
    assert np.array_equal(fnuz.scales[0], 2 * fn.scales[0])
    assert np.array_equal(narrowcast.dequantize(fn), narrowcast.dequantize(fnuz))


def test_recode_refuses_what_has_no_equal_until_the_nearest_is_asked_for() -> None:
    blocks = narrowcast.quantize_tensor(X, "fp8_block128")  # under fp32 scales that are no powers of two
    with pytest.raises(RangeError, match="no equal in fp8_block128_ue8m0"):
        narrowcast.recode(blocks, "fp8_block128_ue8m0")
    nearest = narrowcast.recode(blocks, "fp8_block128_ue8m0", nearest=True)
    assert narrowcast.error_report(X, nearest).sqnr > 25
    with pytest.raises(UsageError):
        narrowcast.recode(blocks, "nvfp4")
