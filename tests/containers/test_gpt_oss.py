"""gpt-oss: what transformers decodes, we decode; what is taken apart is put together again, byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import toys
from narrowcast.containers.gpt_oss import places
from narrowcast.errors import CheckpointError, InputError, UsageError
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.store.checkpoint import Checkpoint

UPSTREAM = Path(__file__).parent / "upstream" / "gpt_oss_mxfp4"
EXPERTS = "model.layers.0.mlp.experts"
ONLY_EXPERTS = "re:.*\\.experts\\..*"
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Tensors = dict[str, NDArray[Any]]
Change = Callable[[Tensors, dict[str, Any]], object]


def tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def quantization(folder: Path) -> dict[str, Any] | None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("quantization_config")


def widened(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def by_hand(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The format's own formula on [E, N, K/32, 16], not transposed: low nibble first, 2^(scale - 127)."""
    nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    values = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*blocks.shape[:2], -1).astype(np.float32)


def copy_of(tmp_path: Path, change: Change) -> Path:
    """The upstream files with something changed."""
    folder = tmp_path / "changed"
    state = load_file(UPSTREAM / "model.safetensors")
    config = json.loads((UPSTREAM / "config.json").read_text())
    change(state, config)
    return toys.write(folder, state, config)


def dealt(tmp_path: Path, shards: int) -> Path:
    state = load_file(UPSTREAM / "model.safetensors")
    return toys.write(tmp_path / "dealt", state, json.loads((UPSTREAM / "config.json").read_text()), shards)


def test_plain_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    """Transposed to [E, in, out], bit for bit, though the down projection is square."""
    convert(UPSTREAM, tmp_path / "plain", "plain")
    plain, decoded = tensors(tmp_path / "plain"), np.load(UPSTREAM / "decoded.npz")
    for name in decoded:
        np.testing.assert_array_equal(widened(plain[name]), decoded[name], strict=True)
    source = load_file(UPSTREAM / "model.safetensors")
    for name in plain.keys() - set(decoded):
        assert plain[name].tobytes() == source[name].tobytes()
    assert set(plain) - set(decoded) == {n for n in source if not n.endswith(("_blocks", "_scales"))}
    assert quantization(tmp_path / "plain") is None


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_apart_and_together_again(tmp_path: Path, shards: int) -> None:
    """To per-expert matrices and back: every tensor, and the config, byte for byte; blocks, scales and biases of a
    stack may lie in different files."""
    source = dealt(tmp_path, shards)
    convert(source, tmp_path / "apart", "compressed-tensors")
    apart = tensors(tmp_path / "apart")
    assert apart[f"{EXPERTS}.1.up_proj.weight_packed"].shape == (64, 32)
    state = load_file(UPSTREAM / "model.safetensors")
    np.testing.assert_array_equal(
        apart[f"{EXPERTS}.1.up_proj.bias"], state[f"{EXPERTS}.gate_up_proj_bias"][1, 1::2]
    )
    np.testing.assert_array_equal(
        apart[f"{EXPERTS}.1.gate_proj.weight_packed"],
        state[f"{EXPERTS}.gate_up_proj_blocks"][1, ::2].reshape(64, 32),
    )
    convert(tmp_path / "apart", tmp_path / "back", "mxfp4")
    back = tensors(tmp_path / "back")
    assert set(back) == set(state)
    for name, value in state.items():
        assert (back[name].shape, back[name].dtype) == (value.shape, value.dtype)
        assert back[name].tobytes() == value.tobytes(), name
    assert quantization(tmp_path / "back") == quantization(UPSTREAM)
    if shards == 1:
        ours, theirs = (folder / "model.safetensors" for folder in (tmp_path / "back", UPSTREAM))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_same_container_is_a_copy(tmp_path: Path) -> None:
    convert(UPSTREAM, tmp_path / "copy", "mxfp4")
    same = (tmp_path / "copy" / "model.safetensors").read_bytes()
    assert same == (UPSTREAM / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (32, 64), (64, 64)])
def test_quantized_stacks_are_the_experts_interleaved(tmp_path: Path, hidden: int, inner: int) -> None:
    """Where hidden = 2 · intermediate both orientations have one shape; the values tell which was written."""
    model = toys.moe(tmp_path / "model", "gpt_oss", hidden=hidden, inner=inner)
    for container in ("mxfp4", "compressed-tensors"):
        run(plan(model, tmp_path / container, "mxfp4a16", container=container, targets=ONLY_EXPERTS))
    stacks, apart = tensors(tmp_path / "mxfp4"), tensors(tmp_path / "compressed-tensors")
    source = tensors(model)
    for expert in range(4):
        for leaf, stack, first, step in (
            ("gate_proj", "gate_up_proj", 0, 2), ("up_proj", "gate_up_proj", 1, 2), ("down_proj", "down_proj", 0, 1)
        ):  # fmt: skip
            blocks = stacks[f"{EXPERTS}.{stack}_blocks"][expert, first::step]
            scales = stacks[f"{EXPERTS}.{stack}_scales"][expert, first::step]
            alone = f"{EXPERTS}.{expert}.{leaf}"
            np.testing.assert_array_equal(blocks.reshape(len(blocks), -1), apart[f"{alone}.weight_packed"])
            np.testing.assert_array_equal(scales, apart[f"{alone}.weight_scale"])
    for stack in ("gate_up_proj", "down_proj"):
        values = by_hand(stacks[f"{EXPERTS}.{stack}_blocks"], stacks[f"{EXPERTS}.{stack}_scales"])
        wanted = widened(source[f"{EXPERTS}.{stack}"]).transpose(0, 2, 1)
        assert (
            np.abs(values - wanted).max() <= np.abs(wanted).max() / 4
        )  # half of the widest gap, 4 to 6 of 6
        np.testing.assert_array_equal(
            stacks[f"{EXPERTS}.{stack}_bias"], source[f"{EXPERTS}.{stack}_bias"], strict=True
        )


def test_transformers_loads_what_we_write(tmp_path: Path) -> None:
    """Through its own dequantizing loader: the values of our own decoding, and biases in their places."""
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    convert(UPSTREAM, tmp_path / "bf16", "plain")
    run(plan(tmp_path / "bf16", tmp_path / "out", "mxfp4a16", container="mxfp4", targets=ONLY_EXPERTS))
    convert(tmp_path / "out", tmp_path / "plain", "plain")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    ours = tensors(tmp_path / "plain")
    state = {name: value for name, value in loaded.state_dict().items() if name in ours}
    assert set(state) == set(ours)
    for name, value in state.items():
        np.testing.assert_array_equal(value.float().numpy(), widened(ours[name]), strict=True)


def test_openai_names_are_read(tmp_path: Path) -> None:
    """The same stacks under OpenAI's names, without a quantization_config; decoded as its own code holds them."""
    state, own = load_file(UPSTREAM / "model.safetensors"), {}
    for theirs, ours in (("mlp1", "gate_up_proj"), ("mlp2", "down_proj")):
        for word in ("blocks", "scales"):
            own[f"block.0.mlp.{theirs}_weight.{word}"] = state[f"{EXPERTS}.{ours}_{word}"]
        own[f"block.0.mlp.{theirs}_bias"] = state[f"{EXPERTS}.{ours}_bias"]
    own["block.0.mlp.gate.weight"] = state["model.layers.0.mlp.router.weight"]
    model = toys.write(
        tmp_path / "openai", own, {"hidden_size": 64, "intermediate_size": 64, "num_experts": 2}
    )
    convert(model, tmp_path / "plain", "plain")
    plain, decoded = tensors(tmp_path / "plain"), np.load(UPSTREAM / "decoded.npz")
    for theirs, ours in (("mlp1", "gate_up_proj"), ("mlp2", "down_proj")):
        values = widened(plain[f"block.0.mlp.{theirs}_weight"])
        np.testing.assert_array_equal(values, decoded[f"{EXPERTS}.{ours}"].transpose(0, 2, 1))
    convert(model, tmp_path / "apart", "compressed-tensors")
    apart = tensors(tmp_path / "apart")
    np.testing.assert_array_equal(
        apart["block.0.mlp.experts.1.up_proj.weight_scale"], state[f"{EXPERTS}.gate_up_proj_scales"][1, 1::2]
    )
    np.testing.assert_array_equal(
        apart["block.0.mlp.experts.1.up_proj.bias"], state[f"{EXPERTS}.gate_up_proj_bias"][1, 1::2]
    )


def test_a_kept_stack_is_carried_and_named(tmp_path: Path) -> None:
    shapes = toys.moe_shapes("gpt_oss", hidden=64, inner=32)
    shapes |= {n.replace(".0.", ".1."): s for n, s in shapes.items()}
    config = toys.moe_config("gpt_oss", hidden=64, inner=32) | {"num_hidden_layers": 2}
    model = toys.write(tmp_path / "model", toys.weights(shapes), config)
    run(plan(model, tmp_path / "out", "mxfp4a16", container="mxfp4", targets="re:.*\\.0\\..*\\.experts\\..*"))
    out, source = tensors(tmp_path / "out"), tensors(model)
    kept = "model.layers.1.mlp.experts"
    for name in (f"{kept}.gate_up_proj", f"{kept}.down_proj", f"{kept}.down_proj_bias"):
        assert out[name].tobytes() == source[name].tobytes()
    block = quantization(tmp_path / "out")
    assert block is not None
    assert kept in block["modules_to_not_convert"]
    assert f"{EXPERTS}.gate_up_proj_blocks" in out
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert len(open_coded(checkpoint).contents.matrices) == 2


def _drop(name: str) -> Change:
    return lambda state, config: state.pop(f"{EXPERTS}.{name}")


def _cut(state: Tensors, config: dict[str, Any]) -> None:
    state[f"{EXPERTS}.down_proj_scales"] = np.ascontiguousarray(
        state[f"{EXPERTS}.down_proj_scales"][:, :, :1]
    )


def _flat(state: Tensors, config: dict[str, Any]) -> None:
    blocks = state[f"{EXPERTS}.down_proj_blocks"]
    state[f"{EXPERTS}.down_proj_blocks"] = blocks.reshape(*blocks.shape[:2], -1)


def _float_scales(state: Tensors, config: dict[str, Any]) -> None:
    scales = state[f"{EXPERTS}.down_proj_scales"]
    state[f"{EXPERTS}.down_proj_scales"] = scales.astype(ml_dtypes.bfloat16)


def _no_blocks(state: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in state if name.endswith(("_blocks", "_scales"))]:
        del state[name]


HOSTILE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no scales": (_drop("down_proj_scales"), ("down_proj_blocks", "down_proj_scales")),
    "no blocks of a stack": (_drop("gate_up_proj_blocks"), ("gate_up_proj_scales", "gate_up_proj_blocks")),
    "too few scales": (_cut, ("U8 [2, 64, 1]", "columns/32")),
    "blocks of three axes": (_flat, ("[2, 64, 32]", "columns/32, 16")),
    "scales that are floats": (_float_scales, ("BF16", "U8")),
    "no blocks at all": (_no_blocks, ("mxfp4", "_blocks")),
    "another model": (lambda s, c: c.update(model_type="qwen3_moe"), ("qwen3_moe", "gpt_oss")),
    "a config that keeps the experts": (
        lambda s, c: c["quantization_config"]["modules_to_not_convert"].append("model.layers.0.mlp.experts"),
        ("down_proj_blocks", "modules_to_not_convert"),
    ),
    "no config": (lambda s, c: c.pop("quantization_config"), ("_blocks", "quantization_config")),
    "a scale too many": (
        lambda s, c: s.update({f"{EXPERTS}.other_proj_scales": np.zeros((2, 4, 4), np.uint8)}),
        ("other_proj_scales", "other_proj_blocks"),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_contradictions_name_both_sides(tmp_path: Path, case: str) -> None:
    change, words = HOSTILE[case]
    with Checkpoint.open(copy_of(tmp_path, change)) as checkpoint, pytest.raises(CheckpointError) as refused:
        open_coded(checkpoint)
    for word in words:
        assert word in str(refused.value)


def test_stacks_without_holes(tmp_path: Path) -> None:
    shapes = {f"a.experts.{e}.{leaf}": (8, 32) for e in range(2) for leaf in ("gate_proj", "up_proj")}
    config = {"model_type": "gpt_oss"}
    found = places(shapes, config)
    assert found["a.experts.1.up_proj"].stem == "a.experts.gate_up_proj"
    del shapes["a.experts.0.up_proj"]
    with pytest.raises(UsageError, match="expert 0, up_proj"):
        places(shapes, config)
    with pytest.raises(UsageError, match="model_type llama"):
        places(shapes, {"model_type": "llama"})
    with pytest.raises(UsageError, match="targets"):
        places({"model.layers.0.self_attn.q_proj": (8, 32)}, config)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    model = toys.moe(tmp_path / "model", "gpt_oss", hidden=64, inner=32)
    with pytest.raises(UsageError, match="no spelling for fp8"):
        plan(model, tmp_path / "out", "fp8_dynamic", container="mxfp4", targets=ONLY_EXPERTS)


def test_a_missing_bias_is_refused(tmp_path: Path) -> None:
    convert(UPSTREAM, tmp_path / "apart", "compressed-tensors")
    state = tensors(tmp_path / "apart")
    del state[f"{EXPERTS}.1.up_proj.bias"]
    save_file(state, tmp_path / "apart" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="gate_up_proj_bias"):
        convert(tmp_path / "apart", tmp_path / "back", "mxfp4")
    shutil.rmtree(tmp_path / "apart")
