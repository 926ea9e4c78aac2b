"""Large tensors go through compiled kernels with the bits of the definition, or say why they do not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from narrowcast.errors import NonFiniteError
from narrowcast.kernels.reference.quantize import quantize as reference
from narrowcast.runtime import tensors
from narrowcast.tensors.schemes import schemes

RNG = np.random.default_rng(5)
PLAIN = RNG.standard_normal((66, 256)).astype(np.float32)
EXPERTS = RNG.standard_normal((2, 3, 24, 128)).astype(np.float32)
EXPERTS[1, 0, 3] = 0
EXPERTS[0, 2] *= 1e-3


@pytest.mark.parametrize("scheme", list(schemes))
@pytest.mark.parametrize("x", [PLAIN, EXPERTS], ids=["matrix", "experts"])
def test_bits_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, scheme: str, x: np.ndarray
) -> None:
    monkeypatch.setattr(tensors, "LARGE", 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = tensors.quantize(x, schemes[scheme])
    wanted = reference(x, schemes[scheme])
    assert np.array_equal(got.codes, wanted.codes)
    for a, b in zip(got.scales, wanted.scales, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array_equal(a, b)
    assert (got.zero is None) == (wanted.zero is None)
    if wanted.zero is not None:
        assert np.array_equal(got.zero, wanted.zero)
    reasons = [str(warning.message) for warning in told if warning.category is RuntimeWarning]
    assert len(reasons) <= 1
    assert all(reason.startswith(f"{scheme} runs on the numpy definition: ") for reason in reasons)


def test_nan_is_refused_by_the_fast_path_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "LARGE", 1)
    x = PLAIN.copy()
    x[5, 6] = np.nan
    with pytest.raises(NonFiniteError, match=r"index \(5, 6\)"):
        tensors.quantize(x, schemes["nvfp4"])
