"""A recipe against a checkpoint: first match wins, and what must not be quantized by accident is not."""

from __future__ import annotations

import pytest

from model.names_corpus import Tensor, config, entries
from narrowcast.errors import UsageError
from narrowcast.model.modules import Module, modules
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import Resolved, Target, resolve

LAYER = "model.layers.0"


def toy(tied: bool = False) -> list[Module]:
    """A small mixture of experts with a vision tower; out of the file when tied: the head."""
    shapes = {
        "model.embed_tokens.weight": (64, 32),
        **{f"{LAYER}.self_attn.{p}_proj.weight": (32, 32) for p in "qkvo"},
        f"{LAYER}.mlp.gate.weight": (2, 32),
        **{
            f"{LAYER}.mlp.experts.{e}.{p}_proj.weight": (32, 32)
            for e in (0, 1)
            for p in ("gate", "up", "down")
        },
        "model.visual.blocks.0.attn.qkv.weight": (96, 32),
        "model.visual.pos_embed.weight": (16, 32),
    }
    if not tied:
        shapes["lm_head.weight"] = (64, 32)
    said = {"tie_word_embeddings": tied, "architectures": ["ToyForCausalLM"]}
    return modules({n: Tensor(n, s) for n, s in shapes.items()}, said)


def settle(text: str, found: list[Module] | None = None) -> Resolved:
    return resolve(Recipe.from_toml(text), toy() if found is None else found)


def targets(settled: Resolved) -> dict[str, str | None]:
    return {a.module.name: None if a.target is None else a.target.name for a in settled.assignments}


def why(settled: Resolved, name: str) -> str:
    return next(a.why for a in settled.assignments if a.module.name == name)


def refused(text: str, problem: str, found: list[Module] | None = None) -> UsageError:
    with pytest.raises(UsageError, match=problem) as caught:
        settle(text, found)
    return caught.value


def rule(match: str, what: str) -> str:
    return f"[[rule]]\nmatch = {match!r}\n{what}\n"


FP8, NVFP4, KEEP = "preset = 'fp8_dynamic'", "preset = 'nvfp4a16'", "keep = true"


def test_a_preset_leaves_its_excluded_roles_alone() -> None:
    settled = settle("default = 'FP8_DYNAMIC'")
    found = targets(settled)
    kept = {name for name, target in found.items() if target is None}
    assert kept == {
        "model.embed_tokens",
        f"{LAYER}.mlp.gate",
        "model.visual.blocks.0.attn.qkv",
        "model.visual.pos_embed",
        "lm_head",
    }
    assert set(found.values()) == {None, "fp8_dynamic"}
    assert why(settled, f"{LAYER}.mlp.gate") == "fp8_dynamic leaves the role router alone"


def test_the_first_match_wins() -> None:
    settled = settle(rule("re:.*self_attn.*", KEEP) + rule("Linear", NVFP4) + rule("re:.*experts.*", FP8))
    found = targets(settled)
    assert found[f"{LAYER}.self_attn.q_proj"] is None
    assert found[f"{LAYER}.mlp.experts.0.up_proj"] == "nvfp4a16"
    assert [(m.count, m.taken) for m in settled.matches] == [(4, 4), (13, 6), (6, 0)]
    assert settled.matches[0].names[0] == f"{LAYER}.self_attn.q_proj"
    assert why(settled, f"{LAYER}.self_attn.q_proj") == "kept by re:.*self_attn.* (recipe.toml, line 1)"


@pytest.mark.parametrize("wide", ["Linear", "re:.*", "re:model.*"])
def test_a_wide_pattern_passes_over_excluded_roles(wide: str) -> None:
    settled = settle(rule(wide, FP8))
    found = targets(settled)
    assert sum(t is not None for t in found.values()) == 10
    assert found["lm_head"] is None
    assert found[f"{LAYER}.mlp.gate"] is None


@pytest.mark.parametrize(
    ("narrow", "taken"),
    [
        ("lm_head", {"lm_head"}),
        ("re:.*lm_head", {"lm_head"}),
        ("re:.*mlp.gate$", {f"{LAYER}.mlp.gate"}),
        ("model.embed_tokens", {"model.embed_tokens"}),
        ("Embedding", {"model.embed_tokens"}),
        ("re:.*visual.*", {"model.visual.blocks.0.attn.qkv"}),
    ],
)
def test_an_explicit_pattern_takes_an_excluded_role(narrow: str, taken: set[str]) -> None:
    found = targets(settle(rule(narrow, FP8)))
    assert {name for name, target in found.items() if target is not None} == taken


def test_what_a_wide_line_passes_over_goes_to_the_next() -> None:
    found = targets(settle(rule("Linear", NVFP4) + rule("lm_head", FP8)))
    assert found["lm_head"] == "fp8_dynamic"
    assert found[f"{LAYER}.self_attn.o_proj"] == "nvfp4a16"


def test_a_scheme_is_a_target_and_the_rule_travels() -> None:
    settled = settle(rule("Linear", "scheme = 'mxfp4'\nrule = 'floor'"))
    target = settled.quantized[0].target
    assert target is not None
    assert (target.kind, target.name, target.rule) == ("scheme", "mxfp4", "floor")
    assert str(target) == "mxfp4 with rule floor"
    assert targets(settled)["lm_head"] is None


def test_unknown_targets_name_the_line() -> None:
    assert refused(rule("Linear", "preset = 'fp9'"), "unknown preset").where == "recipe.toml, line 1"
    assert refused(rule("Linear", "scheme = 'fp9'"), "unknown scheme").where == "recipe.toml, line 1"
    assert refused("default = 'fp9'", "unknown preset").where == "default"


def test_case_12_near_miss() -> None:
    error = refused(rule("re:visual.*", KEEP), "'re:visual.*' matches no module")
    assert "re:.*visual.*" in str(error.wanted)


def test_case_12_fused_group_differs() -> None:
    error = refused(rule("re:.*q_proj", FP8), "fused group differs")
    assert error.where == f"{LAYER}.self_attn.q_proj and {LAYER}.self_attn.k_proj"
    assert str(error.got).startswith("fp8_dynamic")
    assert "kept" in str(error.got)


def test_aliases_of_one_preset_agree() -> None:
    settle(rule("re:.*q_proj", "preset = 'FP8_DYNAMIC'") + rule("re:.*self_attn.*", FP8))


def test_scale_rules_of_siblings_must_agree() -> None:
    one = rule("re:.*q_proj", FP8 + "\nrule = 'amax'")
    refused(one + rule("re:.*self_attn.*", FP8), "fused group differs")


def test_experts_of_a_layer_agree() -> None:
    default = "default = 'fp8_dynamic'\n"
    refused(default + rule("re:.*experts.1.*", KEEP), "experts of one layer differ")
    refused(default + rule("re:.*experts.*down_proj", NVFP4), "experts of one layer differ")


def test_case_16_tied_embeddings() -> None:
    """fp8_dynamic with ignore lm_head: no such tensor, no error, and the embedding stays as it is."""
    settled = resolve(Recipe.from_preset("fp8_dynamic", ["lm_head"]), toy(tied=True))
    assert targets(settled)["model.embed_tokens"] is None
    assert why(settled, "model.embed_tokens") == "tied to lm_head"
    assert (settled.matches[0].count, settled.matches[0].taken) == (0, 0)


@pytest.mark.parametrize(
    "narrow", ["lm_head", "model.embed_tokens", "re:.*embed.*tokens", "re:.*lm_head", "Embedding"]
)
def test_tied_embeddings_are_refused_even_by_name(narrow: str) -> None:
    error = refused(rule(narrow, FP8), "one tied tensor", toy(tied=True))
    assert "untie" in str(error.remedy)


@pytest.mark.parametrize("wide", ["re:.*", "Linear", "re:model.*"])
def test_tied_embeddings_are_never_taken_by_a_wide_rule(wide: str) -> None:
    assert targets(settle(rule(wide, FP8), toy(tied=True)))["model.embed_tokens"] is None


def test_a_tied_head_that_is_in_the_file_is_kept_too() -> None:
    names = ("model.embed_tokens", "lm_head", "model.layers.0.mlp.fc1")
    tensors = {f"{n}.weight": Tensor(f"{n}.weight", (64, 32)) for n in names}
    found = modules(tensors, {"tie_word_embeddings": True})
    assert [m.tied for m in found] == ["lm_head", "model.embed_tokens", None]
    refused(rule("lm_head", FP8), "one tied tensor", found)


def test_a_tied_head_is_safe_from_a_target_that_excludes_nothing() -> None:
    names = ("model.embed_tokens", "lm_head", "model.layers.0.mlp.fc1")
    tensors = {f"{n}.weight": Tensor(f"{n}.weight", (64, 32)) for n in names}
    found = modules(tensors, {"tie_word_embeddings": True})
    recipe = Recipe.from_preset("anything", targets=["re:.*"])
    settled = resolve(recipe, found, lambda kind, name: Target(kind, name, frozenset()))
    assert [a.module.name for a in settled.quantized] == ["model.layers.0.mlp.fc1"]


def test_a_generative_model_without_a_head_is_tied_whatever_the_config_says() -> None:
    found = modules(entries("smollm2-135m"), {**config("smollm2-135m"), "tie_word_embeddings": False})
    assert [m.tied for m in found if m.tied] == ["lm_head"]


def test_an_encoder_is_not_tied() -> None:
    assert not [m for m in modules(entries("all-minilm-l6-v2"), config("all-minilm-l6-v2")) if m.tied]


def test_only_linears_and_embeddings_can_be_named() -> None:
    found = modules(entries("mamba-130m"), config("mamba-130m"))
    error = refused(rule("backbone.layers.0.mixer.x_proj", FP8), "not a linear layer", found)
    assert "scan kernel" in str(error.got)
    refused(rule("re:.*x_proj", FP8), "not a linear layer", found)
    assert targets(settle("default = 'fp8_dynamic'", found))["backbone.layers.0.mixer.x_proj"] is None


def test_linear_alone_needs_something_to_take() -> None:
    shapes = {"lm_head.weight": (64, 32)}
    found = modules({n: Tensor(n, s) for n, s in shapes.items()}, {"tie_word_embeddings": False})
    refused(rule("Linear", FP8), "Linear matches only layers that the preset leaves alone", found)


def test_tensors_that_are_no_matrices() -> None:
    """To keep a norm is what happens anyway; to quantize one is an error that says so."""
    norms = ["model.norm", f"{LAYER}.input_layernorm"]
    recipe = Recipe.from_preset("fp8_dynamic", ["re:.*norm"])
    assert resolve(recipe, toy(), others=norms).matches[0].count == 0
    with pytest.raises(UsageError, match="matches no module"):
        resolve(recipe, toy())
    with pytest.raises(UsageError, match="only tensors that are no matrices"):
        resolve(Recipe.from_preset("fp8_dynamic", targets=["re:.*norm"]), toy(), others=norms)


def test_no_line_takes_it() -> None:
    settled = settle(rule("re:.*self_attn.*", FP8))
    assert why(settled, f"{LAYER}.mlp.experts.0.up_proj") == "no line of the recipe takes it"
    assert why(settle(rule("re:.*", FP8)), "lm_head") == "fp8_dynamic leaves the role lm_head alone"


def test_groups_and_unknown_names_are_handed_on() -> None:
    found = [*toy(), *modules({"a.zorp.weight": Tensor("a.zorp.weight", (8, 8))}, {})]
    settled = resolve(Recipe.from_preset("fp8_dynamic"), found)
    assert settled.unknown == ("a.zorp",)
    assert tuple(f"{LAYER}.self_attn.{p}_proj" for p in "qkv") in settled.groups
    assert sorted(n for g in settled.groups for n in g) == sorted(m.name for m in found)
    assert len(settled.quantized) + len(settled.kept) == len(found)
