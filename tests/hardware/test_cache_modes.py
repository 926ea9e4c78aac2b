"""Bytes of cached tokens: against vLLM's own specs and the sizes of SGLang's buffers."""

import json
import subprocess
from pathlib import Path

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES

SPECS = Path(__file__).with_name("vllm_cache_specs.json")
FOUND = json.loads(SPECS.read_text())
ENGINE = Path(__file__).parents[2] / ".venv-engine/bin/python"


@pytest.mark.parametrize("case", FOUND["heads"], ids=lambda c: f"{c['mode']}-{c['k_dim']}-{c['v_dim']}")
def test_heads_take_what_vllms_specs_say(case: dict) -> None:
    if case["bytes"] is None:  # vLLM refuses the pair
        assert case["mode"].startswith("nvfp4")
        assert case["k_dim"] != case["v_dim"]
        return
    assert CACHE_MODES[case["mode"]].head_bytes(case["k_dim"], case["v_dim"]) == case["bytes"]


@pytest.mark.parametrize("case", FOUND["latents"], ids=lambda c: f"{c['mode']}-{c['dim']}")
def test_latents_take_what_vllms_specs_say(case: dict) -> None:
    assert CACHE_MODES[case["mode"]].latent_bytes(case["dim"]) == case["bytes"]


def test_an_odd_slot_is_filled_up() -> None:
    """vLLM 0.32, TurboQuantConfig.slot_size_aligned: ⌈12·3/8⌉ + 2 and ⌈12·4/8⌉ + 4 are 17."""
    assert CACHE_MODES["turboquant_k3v4_nc"].head_bytes(12, 12) == 18


def test_every_name_of_vllm_has_a_row() -> None:
    named = {word for row in CACHE_MODES.values() for word in row.engines.get("vllm", ())}
    assert named - {"from a compressed-tensors checkpoint with strategy attn_head"} == set(FOUND["modes"])


@pytest.mark.slow
def test_vllms_specs_are_still_what_was_typed() -> None:
    if not ENGINE.exists():
        pytest.skip("the engine's environment (.venv-engine) is not installed; engines/setup.sh makes it")
    script = SPECS.with_suffix(".py")
    done = subprocess.run([ENGINE, script, "--print"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == FOUND


# SGLang 0.5.23, mem_cache/memory_pool.py: K codes, K scales, V codes, V scales of one head of 128 and one token, as
# MHATokenToKVPoolMXFP8 and MHATokenToKVPoolFP4 allocate them; MLATokenToKVPoolFP4 for latents of 576.
@pytest.mark.parametrize(
    ("mode", "heads", "latent"),
    [
        ("mxfp8", 128 + 4 + 128 + 4, None),
        ("fp4_mx_block16", 64 + 8 + 64 + 8, 288 + 36),
        ("nvfp4", 64 + 8 + 64 + 8, 288 + 36),
        ("fp8_e4m3", 256, 576),
        ("bf16", 512, 1152),
    ],
)
def test_sglangs_modes(mode: str, heads: int, latent: int | None) -> None:
    row = CACHE_MODES[mode]
    assert "sglang" in row.engines
    assert row.head_bytes(128, 128) == heads
    if latent is not None:
        assert row.latent_bytes(576) == latent


def test_words_of_engines_and_suffixes_of_presets_find_their_row() -> None:
    names = {"auto": "bf16", "fp8": "fp8_e4m3", "kv8": "fp8_e4m3", "kv8_head": "fp8_head", "kvnv4": "nvfp4"}
    assert {word: CACHE_MODES[word].name for word in names} == names


@pytest.mark.parametrize(
    ("engine", "latent", "some", "none"),
    [
        ("vllm", False, {"bf16", "nvfp4", "ultraquant_4bit"}, {"mxfp8", "fp8_ds_mla", "int8"}),
        ("vllm", True, {"bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"}, {"nvfp4", "int4_per_token_head"}),
        ("sglang", False, {"mxfp8", "fp4_mx_block16"}, {"fp8_per_token_head"}),
        ("tensorrt-llm", False, {"fp8_e4m3", "nvfp4", "int8"}, {"fp8_e5m2"}),
        ("transformers", False, {"bf16"}, {"fp8_e4m3"}),
    ],
)
def test_modes_of_an_engine(engine: str, latent: bool, some: set[str], none: set[str]) -> None:
    names = {row.name for row in CACHE_MODES.of(engine, latent=latent)}
    assert some <= names
    assert not none & names


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean"):
        CACHE_MODES["fp8_e4m"]
    with pytest.raises(UsageError, match="heads of 72"):
        CACHE_MODES["nvfp4"].head_bytes(72, 72)
    with pytest.raises(UsageError, match="latents"):
        CACHE_MODES["fp8_ds_mla"].head_bytes(128, 128)
    with pytest.raises(UsageError, match="288"):
        CACHE_MODES["fp8_ds_mla"].latent_bytes(288)
    with pytest.raises(UsageError, match="stores no latents"):
        CACHE_MODES["mxfp8"].latent_bytes(576)
