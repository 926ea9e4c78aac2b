"""What other libraries write of SmolLM2-135M, beside its parent: every error and warning is a true one, and listed.

The checkpoints are made by benchmarks/peers/save_*.py MODEL .bench/peers, from demo-output/smollm2-bf16; what is not
there is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.audit.run import audit

ROOT = Path(__file__).parents[2]
PEERS, PARENT = ROOT / ".bench" / "peers", ROOT / "demo-output" / "smollm2-bf16"
CUT = "blocks of 128 do not divide 576 and 192 rows: fused layers are refused"
GROUPS = (
    "groups of 128 do not divide 576 columns: AutoRound writes a group that is cut off, engines refuse it"
)
NOT_READ = "the engine has no loader for this container or scheme"
CACHE = "the engine has no FP8 cache, or reads its scales under other names"
# {checkpoint: {rule: why it is so}}, without an engine and beside the parent.
BESIDE: dict[str, dict[str, str]] = {
    "llmc-w4a16-gptq-some": {"NC401": "only down_proj was asked for"},
    "mo-int4-awq": {
        "NC730": "AWQ's factors widen the group of an outlier in row 260 of o_proj: 7.8 dB are left of it"
    },
}
# {engine: {checkpoint: {rule: why}}} on top of that, from headers and scales.
FOR: dict[str, dict[str, dict[str, str]]] = {
    "vllm": {
        "llmc-fp8-block": {"NC560": CUT},
        "ar-fp8-block": {"NC560": CUT},
        "ar-nvfp4": {"NC600": NOT_READ},
        "ar-w4a16": {"NC560": GROUPS, "NC600": GROUPS},
        "ar-w4a16-gptq": {"NC560": GROUPS, "NC600": GROUPS},
        "gq-gptq-act": {"NC600": "vLLM dropped act-order in groups", "NC611": "the same, by its columns"},
        "gq-gptq-v2-asym": {"NC600": "vLLM reads symmetric GPTQ only"},
        "mo-int4-awq": {"NC600": NOT_READ},
    },
    "sglang": {
        "llmc-fp8-block": {"NC560": CUT},
        "llmc-fp8-kv": {"NC612": "SGLang's cache follows ModelOpt's configs, not compressed-tensors'"},
        "llmc-mxfp4": {"NC600": NOT_READ},
        "llmc-mxfp8": {"NC600": NOT_READ},
        "ar-fp8-block": {"NC560": CUT, "NC600": NOT_READ},
        "ar-mxfp4": {"NC600": NOT_READ},
        "ar-nvfp4": {"NC600": NOT_READ},
        "ar-w4a16": {"NC560": GROUPS, "NC600": GROUPS},
        "ar-w4a16-gptq": {"NC560": GROUPS, "NC600": GROUPS},
        "gq-gptq-v2-asym": {"NC600": "SGLang reads symmetric GPTQ only"},
        "mo-int4-awq": {"NC600": NOT_READ},
    },
    "tensorrt-llm": {
        "llmc-fp8-block": {"NC560": CUT},
        "llmc-fp8-kv": {"NC600": NOT_READ, "NC203": CACHE},
        "ar-fp8-block": {"NC560": CUT, "NC600": NOT_READ},
        **{name: {"NC600": NOT_READ} for name in (
            "llmc-mxfp4", "llmc-mxfp8", "llmc-nvfp4a16", "llmc-w8a8-gptq", "llmc-w4a16-gptq-some", "ar-w4a16",
            "ar-w4a16-gptq", "ar-nvfp4", "ar-mxfp4", "gq-gptq-v1", "gq-gptq-v2-asym", "gq-gptq-act")},
    },
    "transformers": {
        "llmc-fp8-block": {"NC560": "transformers takes a block's height from shape / grid"},
        "ar-fp8-block": {"NC560": "transformers takes a block's height from shape / grid"},
        "llmc-fp8-kv": {"NC612": CACHE},
        "mo-fp8-kv": {"NC600": NOT_READ, "NC203": CACHE, "NC612": CACHE},
        "mo-nvfp4-kv8": {"NC600": NOT_READ, "NC203": CACHE, "NC612": CACHE},
        **{name: {"NC600": NOT_READ} for name in ("mo-nvfp4", "mo-int4-awq", "mo-mxfp8")},
    },
}  # fmt: skip
NAMES = (
    "llmc-fp8-block", "llmc-fp8-dynamic", "llmc-fp8-head", "llmc-fp8-kv", "llmc-mxfp4", "llmc-mxfp8", "llmc-nvfp4",
    "llmc-nvfp4a16", "llmc-w4a16-gptq-some", "llmc-w8a8-gptq", "mo-fp8-kv", "mo-nvfp4", "mo-nvfp4-kv8", "mo-int4-awq",
    "mo-mxfp8", "gq-gptq-v1", "gq-gptq-v2-asym", "gq-gptq-act", "ar-w4a16", "ar-w4a16-gptq", "ar-nvfp4",
    "ar-mxfp4", "ar-fp8-block",
)  # fmt: skip


def checkpoint(name: str) -> Path:
    """AutoRound writes into a folder of its own."""
    if not PARENT.is_dir() or not (PEERS / name).is_dir():
        pytest.skip(f"{name} is not there: benchmarks/peers/save_*.py {PARENT} {PEERS}")
    return next((PEERS / name).rglob("config.json")).parent


def graver(model: Path, **asked: object) -> set[str]:
    done = audit(model, workers=1, **asked)  # type: ignore[arg-type]
    return {one.rule for one in done.findings if one.severity != "info"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_peer(name: str) -> None:
    model, wanted = checkpoint(name), set(BESIDE.get(name, {}))
    assert graver(model, against=PARENT) == wanted
    alone = wanted - {"NC730"}  # which needs the parent
    assert graver(model) == alone
    for engine, known in FOR.items():
        assert graver(model, engine=engine, quick=True) == alone | set(known.get(name, {})), engine
