"""A plain head that a config's targets take for a Linear: transformers builds it quantized, vLLM does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.editing import edit_config, quantized
from narrowcast.audit.run import audit


@pytest.mark.parametrize(
    ("head", "engine", "severity"),
    [
        (True, None, "warning"),
        (True, "transformers", "error"),
        (True, "vllm", None),
        (False, "transformers", None),
    ],
)
def test_plain_head(tmp_path: Path, head: bool, engine: str | None, severity: str | None) -> None:
    model = quantized(tmp_path, "fp8_dynamic", head=head)
    asked = {"engine": engine, "select": ["NC501"], "workers": 1}
    assert not audit(model, **asked).findings
    edit_config(model, lambda config: config["quantization_config"].update(ignore=[]))
    found = [(one.tensor, one.severity) for one in audit(model, **asked).findings]
    assert found == ([("lm_head", severity)] if severity else [])


def test_transformers_makes_a_head_of_nothing(tmp_path: Path) -> None:
    """The outside witness: the head's codes are what memory held, or zero, and its scale is in no file."""
    transformers = pytest.importorskip("transformers")
    model = quantized(tmp_path, "fp8_dynamic", head=True)
    edit_config(model, lambda config: config["quantization_config"].update(ignore=[]))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert "weight_scale" in dict(loaded.lm_head.named_parameters())
    edit_config(model, lambda config: config["quantization_config"].update(ignore=["lm_head"]))
    kept = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert list(dict(kept.lm_head.named_parameters())) == ["weight"]
