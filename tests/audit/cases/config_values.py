"""Cases of the rules about configs in several places, keys, dtypes and sizes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from audit.asking import Ask, Case
from audit.cases.config import BLOCK, block, healthy
from audit.editing import at, edit, edit_config, parent, quantized

FILE = "hf_quant_config.json"


def modelopt(folder: Path) -> Path:
    return quantized(folder, "nvfp4a16", "modelopt")


def disagreeing(folder: Path) -> Ask:
    model = edit_config(modelopt(folder), lambda c: c["quantization"].update(kv_cache_quant_algo="FP8"), FILE)
    said = f"{FILE} and config.json disagree about the KV cache"
    return Ask(model, expect={"said": said, "got": "FP8 in the file", "repair": "config"})


def agreeing(folder: Path) -> Ask:
    return Ask(modelopt(folder))


def gptq(folder: Path) -> Path:
    return quantized(folder, "w4a16", "gptq", inner=256)


def stray(folder: Path) -> Ask:
    model = edit_config(gptq(folder), lambda c: c.update(bits=8), "quantize_config.json")
    return Ask(model, expect={"got": "bits 8", "wanted": "bits 4 as in config.json"})


def gptq_as_it_is(folder: Path) -> Ask:
    return Ask(gptq(folder))


def doubled(folder: Path, **more: Any) -> Path:
    model = quantized(folder, "fp8_dynamic")
    return edit_config(model, lambda c: c.update(compression_config={**copy.deepcopy(c[BLOCK]), **more}))


def two_that_differ(folder: Path) -> Ask:
    return Ask(doubled(folder, format="dense"), expect={"repair": "config"})


def two_alike(folder: Path) -> Ask:
    return Ask(doubled(folder))


def mistyped(folder: Path, key: str) -> Path:
    model = quantized(folder, "fp8_block", "fp8", hidden=256, inner=384)
    return block(model, lambda said: said.update({key: []}))


def typo(folder: Path) -> Ask:
    expect = {"got": "ignored_layer", "wanted": "ignored_layers", "severity": "warning"}
    return Ask(mistyped(folder, "ignored_layer"), expect=expect)


def remark(folder: Path) -> Ask:
    return Ask(mistyped(folder, "remarks"))


def without_order(folder: Path) -> Ask:
    model = block(gptq(folder), lambda said: said.pop("desc_act"))
    edit_config(model, lambda c: c.pop("desc_act"), "quantize_config.json")
    return Ask(model, expect={"got": "no desc_act", "severity": "error"})


def status(folder: Path, word: str) -> Path:
    return block(quantized(folder, "fp8_dynamic"), lambda said: said.update(quantization_status=word))


def frozen(folder: Path) -> Ask:
    return Ask(status(folder, "frozen"), expect={"got": "frozen", "repair": "config"})


def cache(folder: Path, bits: int) -> Path:
    scheme = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return block(quantized(folder, "fp8_dynamic"), lambda said: said.update(kv_cache_scheme=scheme))


def four_bits(folder: Path) -> Ask:
    return Ask(cache(folder, 4), expect={"got": "num_bits 4"})


def eight_bits(folder: Path) -> Ask:
    return Ask(cache(folder, 8))


def newer(folder: Path) -> Ask:
    model = block(quantized(folder, "fp8_dynamic"), lambda said: said.update(version="0.21.0"))
    return Ask(model, expect={"severity": "info", "got": "0.21.0"})


def running_in(folder: Path, dtype: str, **more: Any) -> Path:
    return edit_config(parent(folder), lambda config: config.update(torch_dtype=dtype, **more))


def overflowing(folder: Path) -> Ask:
    return Ask(running_in(folder, "float16", model_type="gemma2"), expect={"severity": "warning"})


def overflowing_engine(folder: Path) -> Ask:
    return Ask(running_in(folder, "bfloat16", model_type="gemma2"))


def norm(folder: Path, value: int) -> Path:
    return edit(running_in(folder, "float16"), {"model.norm.weight": at((5,), value)})


def beyond(folder: Path) -> Ask:
    # 0x4780 is 65536 in bf16, the first power of two beyond 65504; 0x477F is 65280.
    return Ask(norm(folder, 0x4780), expect={"tensor": "model.norm.weight", "got": "65536"})


def within(folder: Path) -> Ask:
    return Ask(norm(folder, 0x477F))


def other_dtype(folder: Path) -> Ask:
    return Ask(running_in(folder, "float16"), expect={"got": "fp16", "wanted": "bf16", "severity": "warning"})


def same_dtype(folder: Path) -> Ask:
    return Ask(running_in(folder, "bfloat16"))


def blocks(folder: Path, hidden: int, inner: int) -> Path:
    return quantized(folder, "fp8_block", hidden=hidden, inner=inner)


def cut(folder: Path) -> Ask:
    """The gate of 320 rows is the first half of a fused layer."""
    expect = {"tensor": "model.layers.0.mlp.gate_proj", "severity": "error", "count": 2}
    return Ask(blocks(folder, 256, 320), {"engine": "vllm"}, expect)


def whole(folder: Path) -> Ask:
    return Ask(blocks(folder, 256, 384), {"engine": "vllm"})


def split(folder: Path) -> Ask:
    """Three blocks do not share out to two ranks; four do."""
    expect = {"tensor": "model.layers.0.mlp.down_proj", "facts": {"sizes": [1]}}
    return Ask(blocks(folder, 512, 384), {"engine": "vllm", "tp": 2}, expect)


def split_evenly(folder: Path) -> Ask:
    return Ask(blocks(folder, 512, 512), {"engine": "vllm", "tp": 2})


def heads(folder: Path) -> Ask:
    """Four heads and two of keys and values do not share out to three ranks."""
    expect = {"tensor": "config.json", "got": "--tp 3", "facts": {"sizes": [1, 2, 4]}}
    return Ask(parent(folder), {"engine": "vllm", "tp": 3}, expect)


def heads_copied(folder: Path) -> Ask:
    """Four ranks have one head each, and two of them the same keys and values."""
    return Ask(parent(folder), {"engine": "vllm", "tp": 4})


CASES = {
    "NC530": Case(disagreeing, agreeing),
    "NC531": Case(stray, gptq_as_it_is),
    "NC532": Case(two_that_differ, two_alike),
    "NC540": Case(typo, remark),
    "NC541": Case(without_order, gptq_as_it_is),
    "NC542": Case(frozen, healthy),
    "NC543": Case(four_bits, eight_bits),
    "NC544": Case(newer, healthy),
    "NC550": Case(overflowing, overflowing_engine),
    "NC551": Case(beyond, within),
    "NC552": Case(other_dtype, same_dtype),
    "NC560": Case(cut, whole),
    "NC561": Case(split, split_evenly),
    "NC562": Case(heads, heads_copied),
}
