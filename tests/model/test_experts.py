"""Stacked experts: orientation and order by family, never by shape (field case 13)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from model.names_corpus import Tensor, config, entries
from narrowcast.errors import UsageError
from narrowcast.model.modules import LAYOUTS, Module, Part, modules
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import resolve

PATH = "model.layers.0.mlp.experts"


def stack(family: str | None, version: str = "5.0.0", gate_up: tuple[int, ...] = (4, 64, 32)) -> list[Module]:
    """Case 13: E = 4, hidden size 32, intermediate size 32, so that down is square."""
    shapes = {f"{PATH}.gate_up_proj": gate_up, f"{PATH}.down_proj": (4, 32, 32)}
    for leaf in "qkvo":
        shapes[f"model.layers.0.self_attn.{leaf}_proj.weight"] = (32, 32)
    shapes["model.embed_tokens.weight"] = (64, 32)
    said = {"model_type": family, "transformers_version": version, "hidden_size": 32}
    said["architectures"] = ["ForCausalLM"]
    return modules({n: Tensor(n, s) for n, s in shapes.items()}, said)


def test_square_down_is_read_by_the_family() -> None:
    """The same shapes, two families, two orientations."""
    out_in = {m.name: m for m in stack("qwen3_moe")}
    in_out = {m.name: m for m in stack("llama4", gate_up=(4, 32, 64))}
    assert out_in[f"{PATH}.down_proj"].orientation == "out_in"
    assert in_out[f"{PATH}.down_proj"].orientation == "in_out"
    assert out_in[f"{PATH}.down_proj"].shape == in_out[f"{PATH}.down_proj"].shape
    assert out_in[f"{PATH}.gate_up_proj"].out_in == in_out[f"{PATH}.gate_up_proj"].out_in == (64, 32)


def test_halves_and_interleaved() -> None:
    halves = next(m for m in stack("llama4", gate_up=(4, 32, 64)) if m.name.endswith("gate_up_proj"))
    mixed = next(m for m in stack("gpt_oss", gate_up=(4, 32, 64)) if m.name.endswith("gate_up_proj"))
    assert halves.parts == (Part("gate_proj", 0, 32, 1), Part("up_proj", 32, 64, 1))
    assert mixed.parts == (Part("gate_proj", 0, 64, 2), Part("up_proj", 1, 64, 2))


def test_splits_are_named_like_single_experts() -> None:
    names = [s.name for m in stack("qwen3_moe") for s in m.splits()]
    assert names[:2] == [f"{PATH}.0.gate_proj", f"{PATH}.0.up_proj"]
    assert names[-1] == f"{PATH}.3.down_proj"
    assert len(names) == 12


def test_granite_splits_are_named_experts() -> None:
    names = [s.name for m in modules(entries("granite-3-moe"), config("granite-3-moe")) for s in m.splits()]
    assert names[0] == "model.layers.0.block_sparse_moe.experts.0.gate_proj"
    assert names[-1] == "model.layers.0.block_sparse_moe.experts.31.down_proj"


def test_qwen3_vl_is_told_by_the_version_that_wrote_it() -> None:
    """transformers 4 and the released files store it in_out, transformers 5 saves it out_in."""
    old = next(m for m in stack("qwen3_vl_moe", "4.57.0.dev0", (4, 32, 64)) if "gate_up" in m.name)
    new = next(m for m in stack("qwen3_vl_moe", "5.24.0") if "gate_up" in m.name)
    odd = next(m for m in stack("qwen3_vl_moe", "main", (4, 32, 64)) if "gate_up" in m.name)
    assert (old.orientation, new.orientation, odd.orientation) == ("in_out", "out_in", "in_out")
    assert old.problem is None
    assert new.problem is None


def test_a_shape_against_the_family_is_a_problem_not_a_guess() -> None:
    module = next(m for m in stack("gpt_oss", gate_up=(4, 64, 32)) if "gate_up" in m.name)
    assert module.orientation == "in_out"
    assert module.problem is not None
    assert "hidden size 64" in module.problem
    assert list(module.splits()) == []


def test_an_unknown_family_is_refused_before_any_work() -> None:
    """Case 13: skipping the experts in silence would leave 22 % coverage."""
    found = stack("newcomer")
    with pytest.raises(UsageError, match="layout of stacked experts of model_type 'newcomer' is not known"):
        resolve(Recipe.from_preset("fp8_dynamic"), found)
    kept = resolve(Recipe.from_preset("fp8_dynamic", ["re:.*experts.*"]), found)
    assert len(kept.quantized) == 4


def test_all_experts_are_quantized_where_the_family_is_known() -> None:
    settled = resolve(Recipe.from_preset("fp8_dynamic"), stack("qwen3_moe"))
    sizes = {True: 0, False: 0}
    for assignment in settled.assignments:
        count = 1
        for n in assignment.module.shape:
            count *= n
        sizes[assignment.target is not None] += count
    assert sizes == {True: 18432 - 64 * 32, False: 64 * 32}


def test_gpt2_is_in_out_and_starcoder_is_not() -> None:
    shapes = {"h.0.mlp.c_fc.weight": (768, 768), "h.0.attn.c_attn.weight": (768, 2304)}
    tensors = {n: Tensor(n, s) for n, s in shapes.items()}
    assert {m.orientation for m in modules(tensors, {"model_type": "gpt2"})} == {"in_out"}
    assert {m.orientation for m in modules(tensors, {"model_type": "starcoder2"})} == {"out_in"}
    nameless = {m.name: m.problem for m in modules(tensors, {})}
    assert nameless["h.0.attn.c_attn"] is not None


def modelling_files() -> list[tuple[str, str]]:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed: its sources cannot be compared")
    folder = Path(found.origin).parent / "models"
    files = [(family, folder / family.removesuffix("_text")) for family in LAYOUTS]
    return [(family, (f / f"modeling_{f.name}.py").read_text()) for family, f in files]


def test_layouts_agree_with_the_sources_of_transformers() -> None:
    """Every modelling file allocates gate_up [E, 2I, H] or [E, H, 2I] and cuts it in halves or by two."""
    stack_re = re.compile(r"self\.gate_up_proj = nn\.Parameter\(\s*torch\.(?:empty|zeros)\(\(?([^\n]*?)\)+\n")
    checked = 0
    for family, source in modelling_files():
        found = stack_re.search(source)
        if found is None:
            continue
        axes = [a.strip() for a in found[1].rstrip(")").split(",") if "=" not in a]
        orientation = "out_in" if axes[1].startswith("2 *") else "in_out"
        order = "interleaved" if re.search(r"gate, up = .*\[\.\.\., ::2\]", source) else "halves"
        if order == "halves":
            assert re.search(r"gate, up = .*chunk\(2|gate, up = gate_up\.chunk\(2", source), family
        assert (LAYOUTS[family].orientation, LAYOUTS[family].order) == (orientation, order), family
        checked += 1
    assert checked >= 25
