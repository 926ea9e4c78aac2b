"""Field case 12: what names and patterns match, and fused groups with mixed schemes."""

from __future__ import annotations

from pathlib import Path

import pytest

import narrowcast
import toys
from audit.cases.config import K, block, ignoring, mixed_attention
from narrowcast.audit.config_said import Kept
from narrowcast.audit.run import audit
from narrowcast.errors import UsageError

NAMES = (
    "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj",
    "model.visual.blocks.0.attn.qkv", "lm_head",
)  # fmt: skip
WIDE = {"model.layers.0.mlp.gate", "model.visual.blocks.0.attn.qkv", "lm_head"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The case's modules: gate_proj and up_proj in FP8, the rest plain and listed by name."""
    shapes = {f"{name}.weight": (128, 128) for name in NAMES}
    shapes |= {"model.embed_tokens.weight": (64, 128), "model.layers.0.mlp.down_proj.weight": (128, 128)}
    toys.write(tmp_path / "parent", toys.weights(shapes), toys.llama_config(inner=128, layers=1, head=True))
    narrowcast.quantize(tmp_path / "parent", tmp_path / "child", "fp8_dynamic")
    return tmp_path / "child"


def keeping(model: Path, *entries: str) -> Path:
    return ignoring(block(model, lambda said: said.update(ignore=[])), *entries)


@pytest.mark.parametrize(
    ("entry", "method", "taken"),
    [
        ("model.layers.0.mlp.gate", "compressed-tensors", [0]),
        ("re:visual.*", "compressed-tensors", []),
        ("re:.*visual.*", "compressed-tensors", [3]),
        ("re:.*gate", "compressed-tensors", [0, 1]),
        ("re:.*gate$", "compressed-tensors", [0]),
        ("model.layers.0.mlp.gate", "modelopt", [0, 1]),  # ModelOpt's readers look for names within names
        ("model.layers.0.mlp.gate", "fp8", [0]),
        ("model.layers.0.mlp.gate", "quark", [0]),
    ],
)
def test_what_an_entry_takes(entry: str, method: str, taken: list[int]) -> None:
    kept = Kept(entry, "ignore", "config.json", method)
    assert [i for i, name in enumerate(NAMES) if kept.takes(name)] == taken


def test_names_that_fit(model: Path) -> None:
    keeping(model, *sorted(WIDE))
    assert not [one for one in audit(model, select=["NC5"]).findings if one.severity != "info"]


def test_pattern_without_its_beginning(model: Path) -> None:
    keeping(model, "model.layers.0.mlp.gate", "re:visual.*", "lm_head")
    (found,) = audit(model, select=["NC510"]).findings
    assert found.severity == "error"
    assert found.got == "'re:visual.*', which takes no layer"
    assert found.wanted == "re:.*visual.*"
    assert found.remedy == "did you mean 're:.*visual.*'?"


def test_a_recipe_says_the_same(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"re:\.\*visual"):
        narrowcast.quantize(tmp_path / "parent", tmp_path / "other", "fp8_dynamic", ignore=["re:visual.*"])


def test_pattern_without_its_end(model: Path) -> None:
    """``re:.*gate`` keeps gate_proj, which is quantized: it is named, and the pattern beside it."""
    keeping(model, "re:.*gate", "re:.*visual.*", "lm_head")
    found = {one.rule: one for one in audit(model, select=["NC503", "NC511"]).findings}
    assert found["NC503"].tensor == "model.layers.0.mlp.gate_proj"
    assert found["NC511"].wanted == "re:.*gate$"


def test_fused_group_differs(tmp_path: Path) -> None:
    done = audit(mixed_attention(tmp_path).model)
    found = [one for one in done.findings if one.rule == "NC520"]
    assert [one.tensor for one in found] == [K]
    assert found[0].said.startswith("fused group differs: q_proj fp8_channel")
    assert not done.passed
