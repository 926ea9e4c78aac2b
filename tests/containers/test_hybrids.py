"""Checkpoints with several schemes: INT4 experts beside FP8 attention, NVFP4 beside FP8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import toys
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.coded import Logical, open_coded
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import quantize
from narrowcast.model.recipe import Recipe
from narrowcast.store.checkpoint import Checkpoint

EXPERTS, ATTENTION = r"re:.*\.experts\..*", r"re:.*\.self_attn\..*"


def hybrid(folder: Path, experts: str, attention: str, container: str = "compressed-tensors") -> Path:
    model = toys.moe(folder / "m", "qwen3_moe", hidden=128, inner=128)
    rules = {EXPERTS: experts, ATTENTION: attention}
    text = "\n".join(f"[[rule]]\nmatch = '{match}'\npreset = '{preset}'" for match, preset in rules.items())
    recipe = Recipe.from_toml(text, "r")
    quantize(model, folder / "hybrid", recipe=recipe, container=container)
    return folder / "hybrid"


def schemes(model: Path) -> dict[str, set[str]]:
    """Role to the names of the schemes that its matrices have on disk."""
    found: dict[str, set[str]] = {}
    with Checkpoint.open(model) as checkpoint:
        opened = open_coded(checkpoint)
        for module in opened.modules:
            entry = opened.entries[module.tensor]
            name = entry.stored.how.scheme.name if isinstance(entry, Logical) else "plain"
            found.setdefault(str(module.role), set()).add(name)
    return found


@pytest.mark.parametrize(
    ("experts", "attention", "wanted"),
    [
        ("w4a16", "fp8_dynamic", {"expert": {"int4_g128"}, "attention": {"fp8_channel"}}),
        ("nvfp4a16", "fp8_dynamic", {"expert": {"nvfp4"}, "attention": {"fp8_channel"}}),
        ("mxfp4a16", "fp8_block", {"expert": {"mxfp4"}, "attention": {"fp8_block128"}}),
    ],
)
def test_every_matrix_has_the_scheme_of_its_data(
    tmp_path: Path, experts: str, attention: str, wanted: dict[str, set[str]]
) -> None:
    found = schemes(hybrid(tmp_path, experts, attention))
    assert {role: found[role] for role in wanted} == wanted
    assert found["router"] == found["embedding"] == {"plain"}


def test_a_hybrid_goes_to_modelopt_and_back_to_the_same_bytes(tmp_path: Path) -> None:
    model = hybrid(tmp_path, "nvfp4a16", "fp8_dynamic")
    convert(model, tmp_path / "there", "modelopt")
    config = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    convert(tmp_path / "there", tmp_path / "back", "compressed-tensors")
    for shard in model.glob("*.safetensors"):
        assert (tmp_path / "back" / shard.name).read_bytes() == shard.read_bytes()


def test_a_container_of_one_scheme_refuses_a_hybrid_by_name(tmp_path: Path) -> None:
    model = hybrid(tmp_path, "w4a16", "fp8_dynamic")
    for container, missing in (("gptq", "fp8"), ("fp8", "int4")):
        with pytest.raises(UsageError, match=missing):
            convert(model, tmp_path / "out", container)
    assert not (tmp_path / "out").exists()


def test_groups_that_swap_their_targets_are_contradicted_by_the_data(tmp_path: Path) -> None:
    model = hybrid(tmp_path, "w4a16", "fp8_dynamic")
    config = json.loads((model / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"], groups["group_1"]["targets"] = (
        groups["group_1"]["targets"],
        groups["group_0"]["targets"],
    )
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        convert(model, tmp_path / "out", "plain")
    assert "the config says" in str(refused.value)
    assert refused.value.got != refused.value.wanted
