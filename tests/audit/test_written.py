"""What the toolkit writes is healthy: every container and scheme, of every awkward checkpoint, beside its parent and
for every engine that the plan names."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import edit
from containers.test_matrix import SOURCES, WRITTEN, claims, options
from narrowcast.audit.run import audit
from narrowcast.errors import UsageError
from narrowcast.jobs.quantize import plan, run
from narrowcast.store.checkpoint import Checkpoint

FAST = {("ragged", "fp8_dynamic"), ("ragged", "fp8_block"), ("ragged", "nvfp4a16"), ("experts", "w4a16"),
        ("experts", "mxfp4"), ("gpt_oss experts", "mxfp4a16")}  # fmt: skip
# What is truly so in a checkpoint for an engine that loads it: every kernel comes from a package beside the engine.
KNOWN = {"NC603"}
CASES = [
    pytest.param(
        container, preset, source, marks=[] if (source, preset) in FAST else [pytest.mark.slow],
    )
    for container in WRITTEN
    for preset in toys.PRESETS
    if claims(container, preset)
    for source in SOURCES
]  # fmt: skip


@pytest.fixture(scope="session")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of the containers' tests; those that have no norms are given some."""
    root = tmp_path_factory.mktemp("parents")
    found = {}
    for name, make in SOURCES.items():
        found[name] = make(root / name.replace(" ", "_"))
        with Checkpoint.open(found[name]) as checkpoint:
            names, hidden = set(checkpoint.entries), checkpoint.config["hidden_size"]
        ones = "BF16", np.ones(hidden, ml_dtypes.bfloat16).view(np.uint16)
        layer = [f"model.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")]
        absent = [norm for norm in (*layer, "model.norm.weight") if norm not in names]
        edit(found[name], dict.fromkeys(absent, ones))
    return found


@pytest.mark.parametrize(("container", "preset", "source"), CASES)
def test_written(tmp_path: Path, parents: dict[str, Path], container: str, preset: str, source: str) -> None:
    parent, out = parents[source], tmp_path / "out"
    try:
        settled = plan(parent, out, preset, container=container, **options(container, source))
    except UsageError:
        return  # tests/containers/test_matrix.py holds what is refused
    run(settled)
    asked = [{"against": parent}, *({"engine": name, "quick": True} for name in settled.engines)]
    for how in asked:
        found = [one for one in audit(out, workers=1, **how).findings if one.severity != "info"]
        assert not [one for one in found if one.rule not in KNOWN], how


@pytest.mark.parametrize("preset", ["fp8_dynamic", "w4a16", "nvfp4a16"])
def test_decoded(tmp_path: Path, parents: dict[str, Path], preset: str) -> None:
    """A decoded copy is told as what it is, and is no other model."""
    parent = parents["tied"]
    narrowcast.quantize(parent, tmp_path / "out", preset)
    narrowcast.convert(tmp_path / "out", tmp_path / "plain", "plain")
    found = audit(tmp_path / "plain", against=parent, workers=1).findings
    assert {(one.rule, one.severity) for one in found} >= {("NC702", "info")}
    assert all(one.severity == "info" for one in found)


def test_plain(parents: dict[str, Path]) -> None:
    for parent in parents.values():
        assert not [
            one for one in audit(parent, against=parent, workers=1).findings if one.severity != "info"
        ]
