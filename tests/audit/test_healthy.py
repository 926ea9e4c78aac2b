"""Checkpoints that other tools and this one wrote are healthy: what is found there is true, explained and listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.audit.run import audit

UPSTREAM = Path(__file__).parents[1] / "containers" / "upstream"

# What is truly so in a fixture: {name: {rule: why}}. Everything else of severity error or warning is a false alarm.
KNOWN: dict[str, dict[str, str]] = {}


@pytest.mark.parametrize(
    "name", sorted(path.name for path in UPSTREAM.iterdir() if (path / "config.json").is_file())
)
def test_upstream_fixture(name: str) -> None:
    found = {one.rule: one for one in audit(UPSTREAM / name).findings if one.severity != "info"}
    assert set(found) == set(KNOWN.get(name, {})), list(found.values())


@pytest.mark.parametrize("name", ["bf16", "q8_0"])
def test_gguf(name: str) -> None:
    """A container that is named after its quantized types holds plain models as well."""
    assert audit(UPSTREAM.with_name("gguf_upstream") / "llama" / f"{name}.gguf", select=["NC5"]).passed
