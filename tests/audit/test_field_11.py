"""Field case 11: which tensor-parallel sizes keep blocks of 128 whole; gate and up are split one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

import narrowcast
import toys
from audit.editing import edit_config
from narrowcast.audit.run import audit

SIZES = [1, 2, 4, 8, 16, 32]


def one_layer(folder: Path, inner: int) -> Path:
    """A layer of gate, up and down with ``inner`` channels, quantized in blocks of 128."""
    at = "model.layers.0.mlp"
    shapes = {"model.embed_tokens.weight": (64, 128), f"{at}.down_proj.weight": (128, inner)}
    shapes |= {f"{at}.{name}_proj.weight": (inner, 128) for name in ("gate", "up")}
    toys.write(folder / "parent", toys.weights(shapes), toys.llama_config(hidden=128, inner=inner, layers=1))
    edit_config(
        folder / "parent", lambda config: config.update(num_attention_heads=32)
    )  # for any of the sizes
    narrowcast.quantize(folder / "parent", folder / "child", "fp8_block", container="fp8")
    return folder / "child"


def whole(dimension: int) -> list[int]:
    """The sizes that the case asks for, from its own words: every rank has whole blocks."""
    return [tp for tp in SIZES if dimension % tp == 0 and dimension // tp % 128 == 0]


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [(18432, [1, 2, 4, 8, 16]), (2048, [1, 2, 4, 8, 16]), (1536, [1, 2, 4]), (320, []), (10944, [])],
)
def test_sizes(inner: int, wanted: list[int], tmp_path: Path) -> None:
    assert whole(inner) == wanted
    model = one_layer(tmp_path, inner)
    for tp in SIZES[1:]:
        done = audit(model, engine="vllm", tp=tp, select=["NC561"])
        broken = {one.tensor for one in done.findings}
        assert ("model.layers.0.mlp.gate_proj" in broken) == (tp not in wanted), tp
        assert ("model.layers.0.mlp.down_proj" in broken) == (tp not in wanted), tp
        for one in done.findings:
            sizes = one.facts["sizes"]
            assert [tp for tp in sizes if tp > 1] == [tp for tp in wanted if tp > 1]
            last = one.tensor != "model.layers.0.mlp.gate_proj"
            # Only the last of a fused layer may end in a partial block, and only on one rank.
            assert (1 in sizes) == (1 in wanted or last), one


def test_gate_and_up_one_by_one(tmp_path: Path) -> None:
    """640 rows together are five blocks; 320 are two and a half, so the gate is refused even on one rank."""
    model = one_layer(tmp_path, 320)
    found = {one.tensor: one for one in audit(model, engine="vllm", select=["NC560"]).findings}
    assert found["model.layers.0.mlp.gate_proj"].severity == "error"
    assert found["model.layers.0.mlp.up_proj"].severity == "info"
    assert audit(model, select=["NC560"]).passed  # nobody asked for an engine
