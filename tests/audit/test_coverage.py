"""Coverage and dtypes beyond the one case of each rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.editing import edit, edit_config, parent
from narrowcast.audit.run import audit

NORM = "model.layers.0.input_layernorm.weight"


def found(model: Path, code: str) -> list[tuple[str | None, str | None]]:
    return [(one.severity, one.tensor) for one in audit(model, select=[code]).findings if one.rule == code]


def test_one_fp16_norm(tmp_path: Path) -> None:
    model = edit(parent(tmp_path), {NORM: ("F16", np.ones(128, np.float16))})
    assert found(model, "NC408") == [("warning", NORM)]


@pytest.mark.parametrize(("dtype", "severity"), [("F16", "warning"), ("I16", "error")])
def test_one_other_embedding(tmp_path: Path, dtype: str, severity: str) -> None:
    table = np.zeros((64, 128), np.float16 if dtype == "F16" else np.int16)
    model = edit(parent(tmp_path), {"model.embed_tokens.weight": (dtype, table)})
    assert found(model, "NC403") == [(severity, "model.embed_tokens")]


def test_a_whole_model_in_fp16(tmp_path: Path) -> None:
    """What the config calls bf16 and is fp16 throughout has no odd tensor."""
    model = parent(tmp_path, dtype="fp16")
    assert not found(model, "NC408")
    assert not found(model, "NC403")


def test_untied_by_default(tmp_path: Path) -> None:
    """A Llama whose config does not mention tied embeddings is not tied."""
    model = edit_config(parent(tmp_path), lambda config: config.pop("tie_word_embeddings"))
    assert found(model, "NC411") == [("error", "lm_head.weight")]
