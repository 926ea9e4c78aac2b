"""What has one right answer is written and codes stay; everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from audit.editing import edit, edit_config, quantized
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.coded import open_coded
from narrowcast.repair.run import repair
from narrowcast.store.checkpoint import Checkpoint
from toys import llama

GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"


def values(model: Path) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in narrowcast_values(model)}


def narrowcast_values(model: Path):
    from narrowcast.jobs.matching import held

    with Checkpoint.open(model) as checkpoint:
        opened = open_coded(checkpoint)
        yield from [(n, one.values(0, one.source.shape[0])) for n, one in held(opened).found.items()]


def same_values(a: Path, b: Path) -> None:
    left, right = values(a), values(b)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name].view(np.uint8), right[name].view(np.uint8), name)


def array(model: Path, name: str) -> np.ndarray:
    with Checkpoint.open(model) as checkpoint:
        return np.array(checkpoint.array(name))


@pytest.mark.parametrize("container", ["modelopt", "compressed-tensors"])
def test_fused_outer_with_an_exact_ratio(tmp_path: Path, container: str) -> None:
    """Gate 1/2688 and up 0.25/2688: up's block scales become a quarter (448 is 112), codes and values stay."""
    model = quantized(tmp_path, "nvfp4a16", container)
    divides = container == "compressed-tensors"
    outer = "weight_global_scale" if divides else "weight_scale_2"
    shape = array(model, f"{GATE}.{outer}").shape
    one = np.full(shape, 2688 if divides else np.float32(1) / np.float32(2688), np.float32)
    edit(model, {
        f"{GATE}.{outer}": one, f"{UP}.{outer}": one * np.float32(4 if divides else 0.25),
        f"{UP}.weight_scale": lambda old: np.full_like(old, 0x7E),
    })  # fmt: skip
    done = repair(model, tmp_path / "out")
    assert [(m.repair, m.tensors, m.sqnr) for m in done.mended] == [("fused_outer", (UP,), np.inf)]
    assert done.passed
    assert set(array(tmp_path / "out", f"{UP}.weight_scale").reshape(-1)) == {0x6E}  # 112
    np.testing.assert_array_equal(array(tmp_path / "out", f"{UP}.{outer}"), one)
    same_values(model, tmp_path / "out")


def test_fused_outer_with_another_ratio_says_what_it_cost(tmp_path: Path) -> None:
    model = quantized(tmp_path, "nvfp4a16", "modelopt")
    edit(model, {f"{UP}.weight_scale_2": lambda old: old * np.float32(0.7)})
    done = repair(model, tmp_path / "out")
    [mended] = done.mended
    # Rounding a scale to E4M3 is off by at most 2^-4 of it, so noise is below 2^-8 of the signal.
    assert 10 * np.log10(2**8) < mended.sqnr < 60
    a, b = values(model), values(tmp_path / "out")
    noise = np.square(a[UP].astype(np.float64) - b[UP]).sum()
    assert mended.sqnr == pytest.approx(
        10 * np.log10(np.square(a[UP].astype(np.float64)).sum() / noise), abs=1e-9
    )


def test_ignore_list(tmp_path: Path) -> None:
    """A quantized layer in the list, and one that is not there: the list is written anew, nothing else."""
    model = quantized(tmp_path, "fp8_block", "fp8")
    good = json.loads((model / "config.json").read_text())
    edit_config(model, lambda c: c["quantization_config"].update(modules_to_not_convert=[UP, "lm_haed"]))
    done = repair(model, tmp_path / "out")
    assert [m.repair for m in done.mended] == ["config"]
    assert done.passed
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == good
    same_values(tmp_path / "out", tmp_path / "out")


@pytest.mark.parametrize(
    ("preset", "container"), [("fp8_block", "fp8"), ("nvfp4a16", "modelopt"), ("w4a16", "gptq")]
)
def test_lost_config(tmp_path: Path, preset: str, container: str) -> None:
    """config.json is the parent's again: the block is found from the tensors, or asked for where several fit."""
    model = quantized(tmp_path, preset, container)
    good = values(model)
    edit_config(model, lambda config: config.pop("quantization_config"))
    for name in ("hf_quant_config.json", "quantize_config.json"):
        (model / name).unlink(missing_ok=True)
    done = repair(model, tmp_path / "asked", container=container, preset=preset)
    assert [m.repair for m in done.mended] == ["config"]
    found = values(tmp_path / "asked")
    assert good.keys() == found.keys()
    for name in good:
        np.testing.assert_array_equal(good[name].view(np.uint8), found[name].view(np.uint8))


def test_leftover_config(tmp_path: Path) -> None:
    model = llama(tmp_path / "plain")
    plain = json.loads((model / "config.json").read_text())
    edit_config(model, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    done = repair(model, tmp_path / "out")
    assert [m.repair for m in done.mended] == ["config"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == plain


def test_missing_index(tmp_path: Path) -> None:
    model = llama(tmp_path / "plain", shards=3)
    (model / "model.safetensors.index.json").write_text("{")
    done = repair(model, tmp_path / "out")
    assert [m.repair for m in done.mended] == ["index"]
    same_values(llama(tmp_path / "again", shards=3), tmp_path / "out")


def test_old_kv_name(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_block", "fp8")
    one = np.full((1,), 0.5, np.float32)
    edit(model, {f"model.layers.{i}.self_attn.kv_scale": ("F32", one) for i in (0, 1)})
    done = repair(model, tmp_path / "out")
    assert "kv_names" in [m.repair for m in done.mended]
    for i in (0, 1):
        for which in "kv":
            assert array(tmp_path / "out", f"model.layers.{i}.self_attn.{which}_scale") == 0.5


def test_unity_is_written_only_when_asked(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_dynamic", "compressed-tensors")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    edit_config(model, lambda c: c["quantization_config"].update(kv_cache_scheme=scheme))
    assert "unity_kv" not in [m.repair for m in repair(model, tmp_path / "no").mended]
    done = repair(model, tmp_path / "out", unity=True)
    assert [m.repair for m in done.mended] == ["unity_kv"]
    assert array(tmp_path / "out", "model.layers.1.self_attn.v_scale") == 1.0


def test_lost_shard_is_refused_and_nothing_written(tmp_path: Path) -> None:
    model = llama(tmp_path / "plain", shards=3)
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="no shard has"):
        repair(model, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_nothing_to_mend_writes_nothing(tmp_path: Path) -> None:
    done = repair(quantized(tmp_path, "fp8_dynamic"), tmp_path / "out")
    assert done.mended == ()
    assert not (tmp_path / "out").exists()


def test_unknown_repair(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such repair"):
        repair(llama(tmp_path / "plain"), tmp_path / "out", only=["scales"])
