"""llm-compressor recipes: what maps is mapped, everything else is refused by its name."""

from __future__ import annotations

import json
import sys

import pytest

from model.test_resolve import targets, toy
from narrowcast.errors import UsageError
from narrowcast.model.llmcompressor import equal_preset
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import resolve

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: llm-compressor recipes are YAML")

STAGED = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: [lm_head, 're:.*mlp.gate$']
      scheme: FP8_DYNAMIC
      targets: Linear
"""


def read(text: str) -> Recipe:
    return Recipe.from_llmcompressor(text, "r.yaml")


def lines(text: str) -> list[tuple[str, str | None]]:
    return [(line.pattern.text, line.target) for line in read(text).lines]


def flat(**modifier: object) -> str:
    return json.dumps({"QuantizationModifier": modifier})


def test_stages() -> None:
    assert lines(STAGED) == [("lm_head", None), ("re:.*mlp.gate$", None), ("Linear", "FP8_DYNAMIC")]
    assert read(STAGED).default is None


def test_it_resolves_like_the_preset() -> None:
    mapped = targets(resolve(read(STAGED), toy()))
    assert mapped == targets(resolve(Recipe.from_preset("fp8_dynamic", ["lm_head"]), toy()))


def test_flat_and_list_forms() -> None:
    assert lines(flat(scheme="W4A16")) == [("Linear", "W4A16")]
    assert lines(json.dumps([{"QuantizationModifier": {"scheme": "W4A16"}}])) == [("Linear", "W4A16")]
    assert lines(flat(scheme="W4A16", targets=["re:.*mlp.*", "lm_head"])) == [
        ("re:.*mlp.*", "W4A16"),
        ("lm_head", "W4A16"),
    ]


def test_schemes_with_targets() -> None:
    text = flat(scheme={"FP8_DYNAMIC": ["re:.*self_attn.*"], "NVFP4A16": "re:.*mlp.*"}, ignore="lm_head")
    assert lines(text) == [("lm_head", None), ("re:.*self_attn.*", "FP8_DYNAMIC"), ("re:.*mlp.*", "NVFP4A16")]


def test_two_modifiers_with_one_ignore() -> None:
    pairs = (("FP8", "a"), ("W4A16", "b"))
    both = [{"QuantizationModifier": {"scheme": s, "targets": [t]}} for s, t in pairs]
    assert lines(json.dumps(both)) == [("a", "FP8"), ("b", "W4A16")]
    both[0]["QuantizationModifier"]["ignore"] = ["lm_head"]
    with pytest.raises(UsageError, match="ignore different modules"):
        read(json.dumps(both))


def test_config_groups_that_equal_a_preset() -> None:
    group = {
        "targets": ["re:.*self_attn.*"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "channel",
            "dynamic": False,
            "symmetric": True,
        },
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    assert lines(flat(config_groups={"group_0": group})) == [("re:.*self_attn.*", "fp8_dynamic")]
    assert lines(flat(config_groups={"W4A16": ["Linear"]})) == [("Linear", "W4A16")]
    group["weights"] = {"num_bits": 3, "type": "int", "group_size": 128}
    with pytest.raises(UsageError, match="group_0 equals no preset"):
        read(flat(config_groups={"group_0": group}))


PRESETS = [
    "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "W4A16_ASYM", "W4A8", "W4AFP8",
    "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP4XFP8", "MXFP6A16", "MXFP6A8", "MXFP8", "MXFP8A16",
]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_the_schemes_of_compressed_tensors_are_recognised(name: str) -> None:
    """compressed-tensors spells its own presets out; each must be read back as ours of that name."""
    oracle = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is missing")
    from narrowcast.tensors.presets import presets

    scheme = oracle.preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")
    assert equal_preset(scheme) == presets[name].name


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"GPTQModifier": {"scheme": "W4A16"}}, "GPTQModifier does not map"),
        ({"s_stage": {"quant_modifiers": {"SmoothQuantModifier": {}}}}, "SmoothQuantModifier does not map"),
        ({"FancyModifier": {}}, "FancyModifier does not map"),
        ({"pruning": {}}, "unknown key 'pruning'"),
        ({"QuantizationModifier": {"scheme": "W4A16", "observer": "mse"}}, "observer does not map"),
        (
            {"QuantizationModifier": {"scheme": "FP8", "kv_cache_scheme": {"num_bits": 8}}},
            "kv_cache_scheme needs scales from calibration data",
        ),
        ({"QuantizationModifier": {}}, "needs one of scheme and config_groups"),
        ({"QuantizationModifier": {"scheme": 3}}, "scheme is a name"),
        ({"QuantizationModifier": {"scheme": "FP8", "ignore": 3}}, "ignore is a pattern"),
        ({"QuantizationModifier": {"scheme": "FP8", "targets": {"a": 1}}}, "targets is a pattern"),
        ({"QuantizationModifier": {"config_groups": [1]}}, "config_groups is a mapping"),
        ({"QuantizationModifier": None}, "has no arguments"),
        ({}, "no QuantizationModifier"),
        ([], "no QuantizationModifier"),
        ("text", "not a mapping"),
        (None, "not a mapping"),
    ],
)
def test_what_does_not_map(document: object, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        read(json.dumps(document))
    assert caught.value.where == "r.yaml"


def test_what_is_no_yaml() -> None:
    with pytest.raises(UsageError, match="not YAML"):
        read("a: [")


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="pyyaml is not installed"):
        read(STAGED)
