"""Patterns: exact, re.match, class; no glob, no substring; near misses where nothing matches (case 12)."""

from __future__ import annotations

import pytest

from model.names_corpus import Tensor
from narrowcast.errors import UsageError
from narrowcast.model.modules import Module, modules
from narrowcast.model.patterns import Pattern, near_misses

NAMES = [
    "model.embed_tokens",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.visual.blocks.0.attn.qkv",
    "lm_head",
]
MODULES: list[Module] = modules({f"{n}.weight": Tensor(f"{n}.weight", (64, 64)) for n in NAMES}, {})


def hits(text: str) -> list[str]:
    pattern = Pattern.parse(text)
    return [m.name for m in MODULES if pattern.matches(m)]


def test_exact_is_exact() -> None:
    assert hits("model.layers.0.mlp.gate") == ["model.layers.0.mlp.gate"]
    assert hits("mlp.gate") == []
    assert hits("model.layers.0.mlp") == []


def test_regex_is_anchored_at_the_start_only() -> None:
    assert hits("re:visual.*") == []
    assert hits("re:.*visual.*") == ["model.visual.blocks.0.attn.qkv"]
    assert hits(r"re:.*\.gate") == ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"]
    assert hits(r"re:.*\.gate$") == ["model.layers.0.mlp.gate"]


def test_class_names() -> None:
    assert hits("Linear") == NAMES[1:]
    assert hits("Embedding") == ["model.embed_tokens"]
    assert hits("linear") == []


def test_no_glob() -> None:
    assert hits("*.gate_proj") == []
    assert hits("model.layers.?.mlp.gate") == []


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("re:visual.*", "re:.*visual.*"),
        ("re:lm_haed", "lm_head"),
        ("lm_hed", "lm_head"),
        ("linear", "Linear"),
        ("*.gate_proj", r"re:.*\.gate_proj$"),
        ("model.layers.?.mlp.gate", r"re:model\.layers\..\.mlp\.gate$"),
        ("lm_head.weight", "lm_head"),
        ("gate_proj", "re:.*gate_proj"),
        ("model.layers.0.mlp", r"re:model\.layers\.0\.mlp\."),
        ("model.layers.9.mlp.up_proj", "model.layers.0.mlp.up_proj"),
    ],
)
def test_near_misses(text: str, first: str) -> None:
    assert hits(text) == []
    found = near_misses(Pattern.parse(text), NAMES)
    assert found[0] == first
    assert hits(first), "a suggestion must match something"


def test_nothing_near() -> None:
    assert near_misses(Pattern.parse("zzzzzz"), NAMES) == []


@pytest.mark.parametrize("text", ["", "re:", "re:(", "re:*"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Pattern.parse(text, "recipe.toml, line 3")
    assert caught.value.where == "recipe.toml, line 3"
