"""Every name in the engines' own lists has a row, and what rows say of it is what the source says.

The lists are committed (engine_names.json); where a wheel is here, its lists must be the committed ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import engine_sources
from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.hardware import names
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.names import CACHE, METHOD, Name
from narrowcast.hardware.names.changes import CHANGES
from narrowcast.hardware.names.factorings import FACTORINGS
from narrowcast.tensors.schemes import schemes

KEPT = engine_sources.snapshot()
WHEELS = engine_sources.wheels()
COMMITTED = [(engine, version) for engine, versions in KEPT.items() for version in versions]
VLLM = {
    METHOD: ("methods", "online"),
    names.KEY: ("quant keys",),
    CACHE: ("kv",),
    names.DTYPE: ("dtype",),
    names.LINEAR: ("linear backends",),
    names.EXPERTS: ("expert backends",),
}
SGLANG = {
    METHOD: ("methods", "choices", "cpu"),
    CACHE: ("kv", "kv recipes", "kv reserved"),
    names.DTYPE: ("dtype",),
    names.EXPERTS: ("expert backends",),
    names.FP8_GEMM: ("fp8 gemm backends",),
    names.FP4_GEMM: ("fp4 gemm backends",),
}
LISTS = {"vllm": VLLM, "sglang": SGLANG}


def listed(lists: dict[str, Any], engine: str, kind: str) -> set[str]:
    """The names of a kind in an engine's lists."""
    found = {name for key in LISTS[engine][kind] for name in lists[key]}
    if engine == "sglang" and kind == METHOD:
        found |= {name for added in lists["added"].values() for name in added}
    return found


def of(engine: str, version: str) -> dict[str, Any]:
    lists: dict[str, Any] = KEPT[engine][version]["lists"]
    return lists


@pytest.mark.parametrize(("engine", "version"), COMMITTED)
@pytest.mark.parametrize("number", range(6))
def test_rows_are_the_names_of_a_version(engine: str, version: str, number: int) -> None:
    kind = list(LISTS[engine])[number]
    ours = {row.name for row in names.rows(engine, kind) if row.holds(version)}
    assert ours == listed(of(engine, version), engine, kind)


def test_committed_versions_are_those_of_the_rows() -> None:
    assert {engine: tuple(versions) for engine, versions in KEPT.items()} == {
        engine: names.VERSIONS[engine] for engine in KEPT
    }
    for engine, version in COMMITTED:
        assert engine_sources.fingerprint(of(engine, version)) == KEPT[engine][version]["sha256"]


@pytest.mark.parametrize(("engine", "version"), [*WHEELS] or [("none", "")])
def test_wheels_have_no_name_without_a_row(engine: str, version: str) -> None:
    """A version that is committed must be as committed; a newer one must not have a name that no row explains."""
    if not WHEELS:
        pytest.skip("no wheel is unpacked here: engines/wheels.sh and engines/setup.sh fetch them")
    lists = engine_sources.read(engine, WHEELS[engine, version])
    if version in KEPT[engine]:
        assert lists == of(engine, version)
    for kind in LISTS[engine]:
        known = {row.name for row in names.rows(engine, kind)}
        assert listed(lists, engine, kind) <= known, f"{engine} {version}: names without a row"


def test_rows_are_whole() -> None:
    keys = [(row.engine, row.kind, row.name) for row in names.every()]
    assert len(keys) == len(set(keys)) > 220
    for row in names.every():
        assert row.does in names.DOES, row
        assert row.means, row
        assert not row.means.endswith("."), row
        assert row.flag, row
        assert set(row.containers) <= set(containers), row
        assert row.mode in ("", *CACHE_MODES), row
        if row.kind == CACHE and row.does == names.STORES:
            assert (row.mode, row.storage, row.scales) > ("", "", ""), row
        if row.does == names.ONLINE and row.name != "online":
            assert row.weights, row
            assert row.inputs, row
        if row.does in (names.ALIAS, names.DEPRECATED):
            assert row.instead, row


def test_aliases_name_a_row() -> None:
    for row in names.every():
        if row.does == names.ALIAS:
            assert any(each.name == row.instead for each in names.rows(row.engine, row.kind)), row


def test_schemes_of_rows_are_schemes() -> None:
    """What quantizing while loading makes is a scheme of ours, so that a plan can count it."""
    for row in names.every():
        for said in (row.weights, row.inputs):
            for word in filter(None, said.split(" or ")):
                assert word == "wide" or word in schemes, row


def test_modes_agree_with_the_caches_words() -> None:
    """A mode that a row names lists the engine's word among its own, and the other way round."""
    for engine in names.VERSIONS:
        for row in names.rows(engine, CACHE):
            if row.mode and row.does != names.OUT and row.name != "cpu_fp8_e4m3":
                assert row.name.lower() in CACHE_MODES[row.mode].engines[engine], row
    for mode in CACHE_MODES.values():
        for engine, words in mode.engines.items():
            for word in words if engine in names.VERSIONS else ():
                if " " not in word and (engine, word) != ("tensorrt-llm", "auto"):
                    assert any(row.mode == mode.name for row in names.find(word, engine, CACHE)), (
                        mode.name,
                        word,
                    )


def test_vllms_online_names_are_those_that_quantize_while_loading() -> None:
    lists = of("vllm", "0.32.0")
    ours = {row.name for row in names.rows("vllm", METHOD) if row.does in (names.ONLINE, names.EITHER)}
    # fp8 and humming quantize while loading by other ways than the list of shorthands
    assert ours - {"fp8", "humming"} == {*lists["online"], "online"}


def test_vllms_deprecated_names() -> None:
    for version in names.VERSIONS["vllm"]:
        ours = {row.name for row in names.rows("vllm", METHOD) if row.does == names.DEPRECATED}
        assert ours == set(of("vllm", version)["deprecated"])


def test_vllms_aliases_share_a_class() -> None:
    classes = of("vllm", "0.32.0")["classes"]
    for row in names.rows("vllm", METHOD):
        if (
            row.does == names.ALIAS and row.name != "experts_int8"
        ):  # a class of its own, with the same methods
            assert classes[row.name] == classes[row.instead], row


def test_vllms_cache_backends() -> None:
    backends = of("vllm", "0.32.0")["kv backends"]
    for row in names.rows("vllm", CACHE):
        if row.holds("0.32.0"):
            assert sorted(row.backends) == backends.get(row.name, []), row.name


def test_vllms_linear_backends_stand_for_these_kernels() -> None:
    kernels = of("vllm", "0.32.0")["backend kernels"]
    assert {
        row.name: sorted(row.backends) for row in names.rows("vllm", names.LINEAR) if row.backends
    } == kernels


def test_sglangs_names_that_only_a_checkpoint_can_ask_for() -> None:
    lists = of("sglang", "0.5.23")
    only = set(lists["methods"]) - set(lists["choices"])
    ours = {row.name for row in names.rows("sglang", METHOD) if "does not take it" in row.means}
    assert ours == only


QUOTED = ("config", "engine", "model_executor", "v1/attention", "srt")


def _sources(package: Path) -> str:
    """The source without the seams of adjacent strings."""
    folders = [package / name for name in QUOTED]
    text = "\n".join(file.read_text() for folder in folders for file in sorted(folder.rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_quotations_are_the_engines_words(engine: str) -> None:
    found = [package for (name, _), package in WHEELS.items() if name == engine]
    if not found:
        pytest.skip(f"no source of {engine} is here: engines/wheels.sh fetches it")
    text = "\n".join(_sources(package) for package in found)
    for row in names.rows(engine):
        assert _said(row, text), row


def _said(row: Name, text: str) -> bool:
    """Whether the row's message is in the source, in which its name may be filled in."""
    pieces = row.says.split(row.name) if f"method {row.name} is" in row.says else [row.says]
    return all(piece.strip() in text for piece in pieces)


def test_factorings_name_rows() -> None:
    """Words of the two factorings that are names have rows, on the side that they stand on."""
    for each in FACTORINGS:
        for engine, said in (("vllm", each.vllm), ("sglang", each.sglang)):
            for part in re.split(", | or ", said.partition(" (")[0]):
                word = part.rpartition(" ")[2]
                if word and not word.startswith(("-", "SGLANG")):
                    assert names.find(word, engine), (each.what, word)


def test_changes_are_of_versions_that_rows_cover() -> None:
    assert all(change.version in names.VERSIONS[change.engine][1:] for change in CHANGES)


def test_find() -> None:
    assert [row.engine for row in names.find("FP8", kind=METHOD)] == ["vllm", "sglang", "tensorrt-llm"]
    assert names.find("compressed_tensors", "vllm")[0].name == "compressed-tensors"
    with pytest.raises(UsageError, match="fp8_per_tensor"):
        names.find("fp8_per_tensr")
    with pytest.raises(UsageError, match="no such name in SGLang"):
        names.find("turboquant_k8v4", "sglang")


def test_versions_of_a_row() -> None:
    octave = names.find("octave_k3v4")[0]
    assert not octave.holds("0.32.0")
    assert octave.holds("0.33.0")
