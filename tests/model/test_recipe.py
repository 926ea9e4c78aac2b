"""Recipes as TOML and from options: order is kept, and what nobody reads is refused with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from narrowcast.errors import UsageError
from narrowcast.model.patterns import Pattern
from narrowcast.model.recipe import Line, Recipe
from narrowcast.model.resolve import in_tables

FULL = r"""
default = "fp8_dynamic"

[[rule]]
match = "lm_head"
keep = true

[[rule]]
match = ['re:.*\.experts\..*', "Linear"]
preset = "nvfp4a16"
rule = "amax"

[[rule]]
match = 're:.*down_proj'
scheme = "mxfp8_e4m3"
"""


def test_toml() -> None:
    recipe = Recipe.from_toml(FULL, "r.toml")
    assert recipe.default == "fp8_dynamic"
    assert [(x.pattern.text, x.target, x.kind, x.rule, x.source) for x in recipe.lines] == [
        ("lm_head", None, "preset", None, "r.toml, line 4"),
        (r"re:.*\.experts\..*", "nvfp4a16", "preset", "amax", "r.toml, line 8"),
        ("Linear", "nvfp4a16", "preset", "amax", "r.toml, line 8"),
        ("re:.*down_proj", "mxfp8_e4m3", "scheme", None, "r.toml, line 13"),
    ]


@pytest.mark.parametrize(
    ("text", "problem", "where"),
    [
        ("default = 'fp8'\nrules = []", "unknown key 'rules'", "r.toml"),
        ("default = 1", "default must be the name of a preset", "r.toml"),
        ("", "neither rules nor a default", "r.toml"),
        ("rule = 3", r"\[\[rule\]\] tables", "r.toml"),
        ("not toml", "not TOML", "r.toml"),
        ("\n[[rule]]\nmatch='a'\nkep=true", "unknown key 'kep'", "r.toml, line 2"),
        ("[[rule]]\nkeep=true", "a rule needs match", "r.toml, line 1"),
        ("[[rule]]\nmatch=[]\nkeep=true", "a rule needs match", "r.toml, line 1"),
        ("[[rule]]\nmatch=[1]\nkeep=true", "a rule needs match", "r.toml, line 1"),
        ("[[rule]]\nmatch='a'", "exactly one of preset, scheme and keep", "r.toml, line 1"),
        ("[[rule]]\nmatch='a'\npreset='x'\nkeep=true", "exactly one", "r.toml, line 1"),
        ("[[rule]]\nmatch='a'\nkeep=false", "keep can only be true", "r.toml, line 1"),
        ("[[rule]]\nmatch='a'\nkeep=true\nrule='floor'", "has no scale rule", "r.toml, line 1"),
        ("[[rule]]\nmatch='a'\npreset=8", "names in quotes", "r.toml, line 1"),
        ("[[rule]]\nmatch='a'\npreset='x'\nrule=2", "names in quotes", "r.toml, line 1"),
        ("[[rule]]\nmatch='re:['\nkeep=true", "not a regular expression", "r.toml, line 1"),
    ],
)
def test_bad_toml(text: str, problem: str, where: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        Recipe.from_toml(text, "r.toml")
    assert caught.value.where == where
    assert caught.value.exit_code == 2


def test_an_unknown_key_names_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match="did you mean keep"):
        Recipe.from_toml("[[rule]]\nmatch='a'\nkep=true")


def test_a_rule_written_inside_a_string_does_not_shift_the_places() -> None:
    text = 'default = """\n[[rule]]\n"""\n[[rule]]\nmatch = "re:("\nkeep = true'
    with pytest.raises(UsageError) as caught:
        Recipe.from_toml(text)
    assert caught.value.where == "recipe.toml, rule 1"


def test_ignore_and_targets_are_lines() -> None:
    recipe = Recipe.from_preset("w4a16", ["lm_head"], ["re:.*mlp.*", "Linear"], rule="7")
    assert recipe == Recipe(
        (
            Line(Pattern.parse("lm_head"), None, source="--ignore lm_head"),
            Line(Pattern.parse("re:.*mlp.*"), "w4a16", "preset", "7", "--targets re:.*mlp.*"),
            Line(Pattern.parse("Linear"), "w4a16", "preset", "7", "--targets Linear"),
        )
    )
    assert Recipe.from_preset("w4a16", rule="7") == Recipe((), "w4a16", "7")


def test_the_recipes_of_the_documentation_are_recipes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        recipe = Recipe.from_toml(block)
        for line in recipe.lines:
            assert line.target is None or in_tables(line.kind, line.target).name == line.target
    (staged,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert [line.target for line in Recipe.from_llmcompressor(staged).lines] == [None, "FP8_DYNAMIC"]
