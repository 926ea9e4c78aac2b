"""Repairs that made something worse, or could have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.editing import edit, edit_config, quantized
from narrowcast.errors import UsageError
from narrowcast.repair.run import repair
from narrowcast.report.repair import repair_page
from narrowcast.store.output import Output

GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))


@pytest.mark.parametrize("container", ["modelopt", "compressed-tensors"])
def test_a_wrong_outer_scale_is_not_given_to_healthy_siblings(tmp_path: Path, container: str) -> None:
    """The reciprocal in up would leave nothing of gate; neither is touched, and it is said."""
    model = quantized(tmp_path, "nvfp4a16", container)
    outer = "weight_global_scale" if container == "compressed-tensors" else "weight_scale_2"
    edit(model, {f"{UP}.{outer}": lambda old: (1 / old).astype(np.float32)})
    done = repair(model, tmp_path / "out")
    assert done.mended == ()
    assert any("again" in said for said in done.unmended)
    assert not (tmp_path / "out").exists()


def test_a_broken_value_changes_no_container(tmp_path: Path) -> None:
    """One outer scale is NaN: the config is right, and no other container's is written instead."""
    model = quantized(tmp_path, "nvfp4a16")
    edit(model, {f"{DOWN}.weight_global_scale": lambda old: old * np.float32("nan")})
    done = repair(model, tmp_path / "out")
    assert done.mended == ()
    assert not (tmp_path / "out").exists()


def test_unity_needs_its_own_word(tmp_path: Path) -> None:
    """Chosen and not asked for: nothing would be done, and nothing said."""
    with pytest.raises(UsageError, match=r"1\.0"):
        repair(quantized(tmp_path, "fp8_dynamic"), tmp_path / "out", only=["unity_kv"])


def test_other_weights_are_left_out_and_said(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_block", "fp8")
    edit_config(model, lambda c: c["quantization_config"].update(modules_to_not_convert=[UP]))
    (model / "pytorch_model.bin").write_bytes(b"PK")
    done = repair(model, tmp_path / "out")
    assert done.left_out == ("pytorch_model.bin",)
    assert "not copied: pytorch_model.bin" in "\n".join(repair_page(done))
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_interrupted_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two shards; the second run ends with the bytes of one that was never stopped."""
    model = quantized(tmp_path, "fp8_block", "fp8")
    edit_config(model, lambda c: c["quantization_config"].update(modules_to_not_convert=[UP]))
    repair(model, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Output, "put", lambda *_: None)
        patch.setattr(Output, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt, match="--resume"):
            repair(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    repair(model, tmp_path / "out", resume=True)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
