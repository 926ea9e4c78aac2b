"""``calibrate-kv``: scales in a checkpoint that is there, or in an overlay; every other byte stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from narrowcast import audit
from narrowcast.cli import main
from narrowcast.containers.caches import cache_scales
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.cache_scales import read_overlay
from narrowcast.jobs.quantize import quantize
from narrowcast.jobs.stats import Stats
from narrowcast.repair.kv_scales import write_kv_scales
from narrowcast.report.calibrate import calibrate_kv_page
from narrowcast.studies.calibrate import calibrate
from narrowcast.studies.calibrate_kv import calibrate_kv, save_overlay
from studies.calibrated_toys import bf16, llama, texts

F32 = np.float32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Stats]:
    """A bf16 Llama, its statistics as a file, and what is in it."""
    folder = tmp_path_factory.mktemp("made")
    model = bf16(llama(folder / "plain"), folder / "model")
    done = calibrate(model, folder / "stats.safetensors", texts(folder, 60), context=64)
    return model, done.out, done.stats


def content(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("preset", "container", "heads", "suffix", "shape"),
    [
        ("fp8_dynamic", "compressed-tensors", False, ".k_scale", (1,)),
        ("w4a16", "compressed-tensors", True, ".k_scale", (2, 1, 1)),
        ("nvfp4a16", "modelopt", False, ".k_proj.k_scale", ()),
        ("fp8_per_tensor", "fp8", False, ".k_scale", (1,)),
        ("fp8_per_tensor", "quark", False, ".k_proj.output_scale", ()),
    ],
)
def test_the_scales_and_nothing_else(
    made: tuple[Path, Path, Stats], tmp_path: Path, preset: str, container: str, heads: bool, suffix: str,
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    model, file, stats = made
    child, out = tmp_path / "child", tmp_path / "out"
    quantize(model, child, preset, container=container)
    found = calibrate_kv(child, stats=file, heads=heads, measure=0)
    assert found.kin
    done = write_kv_scales(child, out, found.scales)
    assert not [one for one in done.left if one.severity != "info"]
    before, after = content(child), content(out)
    new = set(after) - set(before)
    assert len(new) == 4
    for name, value in before.items():
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (after[name], value))), name
    for path, both in stats.caches.items():
        seen = both["k"].channels if heads else F32([both["k"].amax])
        assert after[path + suffix].shape == shape
        assert after[path + suffix].reshape(-1).tolist() == (seen / F32(448)).tolist()
    kept, said = config(child), config(out)
    kept.pop("quantization_config"), said.pop("quantization_config")
    assert said == kept
    assert audit(out).subject.opened.contents.kv is not None or container == "fp8"
    for name in ("tokenizer.json", "narrowcast.json"):
        assert (out / name).read_bytes() == (child / name).read_bytes()


def test_scales_that_were_there_are_replaced(made: tuple[Path, Path, Stats], tmp_path: Path) -> None:
    model, file, stats = made
    quantize(model, tmp_path / "child", "fp8+kv8", stats=file, stat="p50")
    found = calibrate_kv(tmp_path / "child", stats=file, measure=0)
    write_kv_scales(tmp_path / "child", tmp_path / "out", found.scales)
    before, after = content(tmp_path / "child"), content(tmp_path / "out")
    assert set(after) == set(before)
    for path, both in stats.caches.items():
        for which in "kv":
            wanted = F32(both[which].amax) / F32(448)
            assert after[f"{path}.{which}_scale"].item() == wanted != before[f"{path}.{which}_scale"].item()


def test_an_overlay_belongs_to_one_model(made: tuple[Path, Path, Stats], tmp_path: Path) -> None:
    model, file, stats = made
    overlay = tmp_path / "kv.safetensors"
    made_of = calibrate_kv(model, stats=file, measure=0)
    save_overlay(made_of, overlay)
    names = load_file(overlay)
    assert {(one.attention, one.which) for one in cache_scales(names)} == {
        (path, which) for path in stats.caches for which in "kv"
    }
    back = read_overlay(overlay)
    assert back is not None
    assert back.sha256 == made_of.scales.sha256
    assert back.by_layer("v")[1].tolist() == [
        F32(stats.caches["model.layers.1.self_attn"]["v"].amax) / F32(448)
    ]
    other = bf16(llama(tmp_path / "plain", seed=4), tmp_path / "other")
    with pytest.raises(UsageError, match="of another model"):
        calibrate_kv(other, stats=overlay, measure=0)
    with pytest.raises(UsageError, match="exists"):
        save_overlay(made_of, overlay)


def test_a_damaged_overlay_is_told(made: tuple[Path, Path, Stats], tmp_path: Path) -> None:
    model, file, _ = made
    overlay = tmp_path / "kv.safetensors"
    save_overlay(calibrate_kv(model, stats=file, measure=0), overlay)
    with safe_open(overlay, "pt") as opened:
        metadata = opened.metadata()
    broken = {name: value * 2 for name, value in load_file(overlay).items()}
    save_file(broken, overlay, metadata)
    with pytest.raises(InputError, match="checksum"):
        read_overlay(overlay)


def test_the_measured_divergences(made: tuple[Path, Path, Stats], tmp_path: Path) -> None:
    """Keys of a thousand saturate at a scale of 1.0, and that costs; computed scales keep them."""
    model, _, _ = made
    large = shutil.copytree(model, tmp_path / "large")
    weights = load_file(large / "model.safetensors")
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.k_proj.weight"] *= 1024
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"] /= 1024
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    files = texts(tmp_path, 40, 30, 30, seed=7)
    found = calibrate_kv(large, files, tokens=40, measure=60, dtype="float32")
    rows = {row.name: row for row in found.measured}
    assert list(rows) == ["unity", "computed", "per head"]
    assert rows["unity"].keys_clipped > 0.5
    assert rows["computed"].keys_clipped < 0.01
    assert rows["unity"].gap.kl.estimate > 10 * rows["computed"].gap.kl.estimate > 0
    assert found.layers[0]["k_beyond_448"] > 0.5
    assert found.layers[0]["v_beyond_448"] == 0
    clipped = f"unity clips {100 * rows['unity'].keys_clipped:.2g} % of K here"
    assert found.conclusion.startswith(clipped)
    assert found.conclusion.endswith("cannot be told apart on 2 documents")
    apart = calibrate_kv(large, texts(tmp_path, *[40] * 9, seed=7), tokens=40, measure=320, dtype="float32")
    assert apart.conclusion.startswith("unity clips ")
    assert " % of K here and costs " in apart.conclusion
    page = " ".join(" ".join(calibrate_kv_page(found, "out", ())).split())
    assert f"of {found.text.name}, sha256" in page  # type: ignore[union-attr]
    assert "documents that the scales were not made from" in page
    assert found.to_json()["conclusion"] in page.replace("Unity", "unity")


def test_caches_that_are_alike_are_said_to_be(made: tuple[Path, Path, Stats], tmp_path: Path) -> None:
    """Random keys of order one: nothing is clipped, and eight bits are eight bits. Both runs read the same text."""
    model, _, _ = made
    files = texts(tmp_path, 30, 30, 30, seed=7)
    calibrate(model, tmp_path / "same.stats", files, tokens=None, dtype="float32")
    found = calibrate_kv(model, files, stats=tmp_path / "same.stats", measure=90, dtype="float32")
    said = "unity clips nothing here, and the three cannot be told apart on this text"
    assert (found.conclusion, found.fresh) == (said, False)


def test_what_cannot_be_done(made: tuple[Path, Path, Stats], tmp_path: Path) -> None:
    model, file, _ = made
    scales = calibrate_kv(model, stats=file, measure=0).scales
    with pytest.raises(UsageError, match="--overlay"):
        write_kv_scales(model, tmp_path / "out", scales)
    other = bf16(llama(tmp_path / "plain", seed=4), tmp_path / "other")
    quantize(other, tmp_path / "child", "fp8_dynamic")
    with pytest.raises(UsageError, match="of another model"):
        write_kv_scales(tmp_path / "child", tmp_path / "out", scales)


def test_the_command(
    made: tuple[Path, Path, Stats], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file, _ = made
    quantize(model, tmp_path / "child", "fp8_dynamic")
    text = texts(tmp_path, 30, 30)
    asked = ["calibrate-kv", str(tmp_path / "child"), str(tmp_path / "out"), "-q"]
    assert main([*asked, "--text", text[0], "--text", text[1], "--tokens", "30", "--measure", "20"]) == 0
    page = capsys.readouterr().out
    assert "per head" in page
    assert "beyond 448" in page
    assert main([*asked, "--stats", str(file)]) == 2  # it exists
    assert main(["calibrate-kv", str(model), str(tmp_path / "kv"), "--overlay", "--stats", str(file), "--json",
                 "--text", text[0], "--measure", "20"]) == 0  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    assert said["kv"] == "fp8"
    assert [row["name"] for row in said["measured"]] == ["unity", "computed", "per head"]
    assert main(["calibrate-kv", str(model), str(tmp_path / "x"), "--stats", str(file)]) == 2
    assert "--overlay" in capsys.readouterr().err
