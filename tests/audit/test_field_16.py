"""Tied embeddings that a tool quantized: it exits 0, and the model then prints question marks."""

from __future__ import annotations

from pathlib import Path

import narrowcast
import toys
from audit.cases.coverage_structure import quantized_table
from narrowcast.audit.run import audit
from narrowcast.store.checkpoint import Checkpoint

TABLE = "model.embed_tokens.weight"


def test_quantized_by_another(tmp_path: Path) -> None:
    found = [one for one in audit(quantized_table(tmp_path).model).findings if one.rule == "NC412"]
    assert [(one.severity, one.tensor, one.got) for one in found] == [
        ("error", "model.embed_tokens", "fp8_channel")
    ]


def test_ours_keeps_it(tmp_path: Path) -> None:
    """64x32, tied, no head in the file, and lm_head ignored: the embedding stays as it is, byte for byte."""
    origin = toys.llama(tmp_path / "parent", hidden=32, inner=64)
    narrowcast.quantize(origin, tmp_path / "child", "fp8_dynamic", ignore=["lm_head"])
    with Checkpoint.open(origin) as before, Checkpoint.open(tmp_path / "child") as after:
        assert before.array(TABLE).tobytes() == after.array(TABLE).tobytes()
    done = audit(tmp_path / "child", against=origin, select=["NC0", "NC4"])
    assert not [one for one in done.findings if one.severity != "info"]
