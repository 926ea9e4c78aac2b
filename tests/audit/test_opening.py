"""Opening what is broken: only refusals may come of it, one fault is one finding, and the rest is still seen."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import edit, parent, quantized, write
from audit.test_healthy import UPSTREAM
from narrowcast.audit.findings import Finding
from narrowcast.audit.opening import PATIENCE, open_anyway
from narrowcast.audit.run import audit
from narrowcast.errors import NarrowcastError
from narrowcast.store.folder import INDEX
from narrowcast.store.safetensors import Reader

SCALE = "model.layers.1.mlp.up_proj.weight_scale"


def errors(model: Path) -> list[Finding]:
    return [one for one in audit(model, workers=1).findings if one.severity == "error"]


def test_one_missing_scale(tmp_path: Path) -> None:
    model = edit(quantized(tmp_path, "fp8_dynamic", layers=12), {SCALE: None})
    found = open_anyway(model)
    assert found.opened is not None
    assert len(found.opened.contents.matrices) == 12 * 7 - 1
    assert found.set_aside == {SCALE.removesuffix("_scale")}


def test_few_faults_of_a_kind_are_told_apart(tmp_path: Path) -> None:
    """Scales with a row too few in three layers of twelve: nine layers of that kind are left."""
    lost = [SCALE.replace(".1.", f".{i}.") for i in (1, 5, 9)]
    model = edit(quantized(tmp_path, "fp8_dynamic", layers=12), dict.fromkeys(lost, lambda old: old[:-1]))
    found = open_anyway(model)
    assert {refusal.module for refusal in found.layer_refusals} == {
        name.removesuffix(".weight_scale") for name in lost
    }
    assert found.opened is not None
    assert len(found.opened.contents.matrices) == 12 * 7 - 3


def test_the_same_fault_everywhere(tmp_path: Path) -> None:
    """No scale at all: a few refusals of each kind of layer, not one for each of 280 matrices."""
    model = quantized(tmp_path, "fp8_dynamic", layers=40, hidden=16, inner=32)
    with Reader(model / "model.safetensors") as reader:
        scales = [name for name in reader.entries if name.endswith("_scale")]
    found = open_anyway(edit(model, dict.fromkeys(scales)))
    assert len(found.layer_refusals) <= 7 * (PATIENCE + 1)
    assert len(found.set_aside) == 40 * 7


@pytest.mark.parametrize("damage", ["cut", "gone", "pointer"])
def test_one_shard_of_three(tmp_path: Path, damage: str) -> None:
    """What is in the lost shard is not missing from the model, and layers that lie in others too are not broken."""
    origin = parent(tmp_path, shards=3, layers=4)
    narrowcast.quantize(origin, tmp_path / "child", "fp8_dynamic")
    shard = sorted((tmp_path / "child").glob("*.safetensors"))[1]
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "pointer":
        shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    else:
        shard.unlink()
    found = errors(tmp_path / "child")
    assert [(one.rule, one.tensor) for one in found] == [
        ({"cut": "NC002", "gone": "NC005", "pointer": "NC003"}[damage], shard.name)
    ]
    seen = audit(tmp_path / "child", workers=1).subject
    assert 0 < len(seen.matrices) < 28


def test_second_copy_with_scalars(tmp_path: Path) -> None:
    """Tensors without an axis are compared like others."""
    model = quantized(tmp_path, "nvfp4a16", "modelopt")
    (model / "model.safetensors").rename(model / "a.safetensors")
    shutil.copy(model / "a.safetensors", model / "b.safetensors")
    found = [one for one in errors(model) if one.rule == "NC015"]
    assert found
    assert ", 0 of them with other bytes" in found[0].said


def test_unknown_refusals_are_kept(tmp_path: Path) -> None:
    """A config that engines cannot read is one finding, and the tensors are still looked at."""
    model = quantized(tmp_path, "fp8_dynamic")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": "LlamaForCausalLM"}))
    assert {one.rule for one in errors(model)} == {"NC002"}
    assert len(audit(model, workers=1).subject.matrices) == 14


@pytest.mark.parametrize(("key", "value"), [("sparsity_config", -1), ("ignore", 3), ("config_groups", [1])])
def test_config_of_other_kinds(tmp_path: Path, key: str, value: Any) -> None:
    """Values that no reader takes are refused in each way of reading the configs, not only in the first."""
    model = quantized(tmp_path, "fp8_dynamic")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"][key] = value
    (model / "config.json").write_text(json.dumps(config))
    assert any(f"{key} is no " in one.said for one in errors(model))


def test_nothing_to_open(tmp_path: Path) -> None:
    for name in ("absent", "empty"):
        with pytest.raises(NarrowcastError):
            audit(tmp_path / name)
        (tmp_path / "empty").mkdir(exist_ok=True)


# Random damage ----------------------------------------------------------------------------------------------------


def _tensors(shard: Path) -> dict[str, tuple[str, np.ndarray]]:
    with Reader(shard) as reader:
        return {
            name: (entry.dtype.name, np.array(reader.array(name))) for name, entry in reader.entries.items()
        }


def cut(model: Path, dice: random.Random) -> bool:
    file = dice.choice([*_shards(model), model / "config.json"])
    content = file.read_bytes()
    file.write_bytes(content[: dice.randrange(len(content))])
    return True


def drop(model: Path, dice: random.Random) -> bool:
    """A weight of a projection, in whichever spelling; other pieces are their own rules' business."""
    shard = dice.choice(_shards(model))
    tensors = _tensors(shard)
    names = [
        name
        for name in tensors
        if name.endswith(("_proj.weight", "_packed", "qweight", "embed_tokens.weight"))
    ]
    if names:
        del tensors[dice.choice(names)]
        write(shard, tensors)
    return bool(names)


def reshape(model: Path, dice: random.Random) -> bool:
    shard = dice.choice(_shards(model))
    tensors = _tensors(shard)
    names = [
        n
        for n, (dtype, a) in tensors.items()
        if dtype == "BF16" and n.endswith("_proj.weight") and a.ndim == 2
    ]
    if names:
        name = dice.choice(names)
        dtype, values = tensors[name]
        tensors[name] = dtype, values[:-1]
        write(shard, tensors)
    return bool(names)


def header(model: Path, dice: random.Random) -> bool:
    """Bytes of a header at random: most are refused, some make another name."""
    shard = dice.choice(_shards(model))
    content = bytearray(shard.read_bytes())
    size = int.from_bytes(content[:8], "little")
    for _ in range(3):
        content[dice.randrange(8 + size)] = dice.randrange(256)
    shard.write_bytes(bytes(content))
    return False  # a byte of the metadata may be anything


def value(model: Path, dice: random.Random) -> bool:
    """Any value of the config replaced by one of another kind."""
    config = json.loads((model / "config.json").read_text())
    node: Any = config
    while True:
        key = dice.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or dice.random() < 0.2:
            break
        node = node[key]
    node[key] = dice.choice([None, -1, 1e9, "x", [], {}, {"a": 1}, True])
    (model / "config.json").write_text(json.dumps(config))
    return False  # most keys decide nothing that is stored


def without(model: Path, dice: random.Random) -> bool:
    dice.choice([*_shards(model), model / "config.json"]).unlink()
    return True


def swapped(model: Path, dice: random.Random) -> bool:
    shards = _shards(model)
    if len(shards) < 2:
        return False
    one, other = dice.sample(shards, 2)
    one.rename(model / "aside")
    other.rename(one)
    (model / "aside").rename(other)
    return (model / INDEX).exists()


def _shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


DAMAGE: tuple[Callable[[Path, random.Random], bool], ...] = (
    cut, drop, reshape, header, value, value, without, swapped,
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    plain = toys.llama(folder / "plain", shards=3)
    narrowcast.quantize(plain, folder / "quantized", "fp8_dynamic")
    whole = ("FP8", "nvfp4", "w4a16", "gptq", "mxfp4", "block32", "int8", "uint4")
    theirs = [
        p for p in sorted(UPSTREAM.iterdir()) if (p / "config.json").is_file() and p.name != "torchao_classes"
    ]
    return [plain, folder / "quantized", *(p for p in theirs if any(word in p.name for word in whole))]


@pytest.mark.parametrize("seed", range(60))
def test_random_damage(seed: int, sources: list[Path], tmp_path: Path) -> None:
    """Whatever is damaged: no other error than ours, and a finding (or a refusal) where something real is broken."""
    dice = random.Random(seed)
    model = tmp_path / "model"
    shutil.copytree(dice.choice(sources), model)
    real = DAMAGE[seed % len(DAMAGE)](model, dice)
    try:
        done = audit(model, workers=1)
    except NarrowcastError:
        return
    assert not (real and done.passed)
