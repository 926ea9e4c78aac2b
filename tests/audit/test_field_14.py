"""GPTQ zero points under the label of the other version (a published tool read one as the other)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit.editing import edit, edit_config, quantized
from narrowcast.audit.run import Audit, audit

NAMES = [f"model.layers.{i}.mlp.{name}" for i in (0, 1) for name in ("gate_proj", "up_proj", "down_proj")]


def word(pattern: int) -> Any:
    return lambda old: np.full_like(old, np.uint32(pattern).astype(np.int32))


def zero_points(folder: Path, pattern: int, label: str) -> Audit:
    """4-bit symmetric weights whose zero points are all ``pattern``."""
    model = quantized(folder, "w4a16", "gptq")
    edit(model, {f"{name}.qzeros": word(pattern) for name in NAMES})
    edit_config(model, lambda config: config["quantization_config"].update(checkpoint_format=label))
    edit_config(model, lambda config: config.update(checkpoint_format=label), "quantize_config.json")
    return audit(model, select=["NC001", "NC3"])


@pytest.mark.parametrize(("pattern", "label"), [(0x88888888, "gptq"), (0x77777777, "gptq_v2")])
def test_the_other_version_is_named(tmp_path: Path, pattern: int, label: str) -> None:
    found = zero_points(tmp_path, pattern, label)
    wrong = [one for one in found.findings if one.rule == "NC350"]
    looks = "v2" if label == "gptq" else "v1"
    assert {one.tensor for one in wrong} >= {f"{name}.qzeros" for name in NAMES}
    assert all(one.said == f"its zero points look like {looks}" and one.severity == "error" for one in wrong)
    assert not found.passed
    assert not [one for one in found.findings if one.rule == "NC001"]  # said once


def test_its_own_label_is_healthy(tmp_path: Path) -> None:
    assert zero_points(tmp_path, 0x77777777, "gptq").findings == ()


def test_asymmetric_zero_points_three() -> None:
    """Zero point 3, codes 0 to 15, scale 1: the values are -3 to 12 in either version, stored as 2 and as 3."""
    from narrowcast.containers.words import gptq_parts
    from narrowcast.numbers.formats import FP16, UINT4
    from narrowcast.tensors.storage import stored_scheme

    scheme = stored_scheme(UINT4, (1, 128), FP16, zero=UINT4)
    zero = np.full((8, 1), 3, np.uint8)
    for version, stored in ((1, 0x22222222), (2, 0x33333333)):
        part = next(part for part in gptq_parts(scheme, version) if part.piece == "zero")
        words = part.encode(zero)
        assert words.view(np.uint32).tolist() == [[stored]]
        assert part.decode(words, 8).tolist() == zero.tolist()
        assert (np.arange(16) - part.decode(words, 8)[0, 0].astype(int)).tolist() == list(range(-3, 13))
