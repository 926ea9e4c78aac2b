"""Cases of the rules about where a checkpoint runs."""

from __future__ import annotations

import json
from pathlib import Path

from audit.asking import Ask, Case
from audit.editing import parent, quantized

UPSTREAM = Path(__file__).parents[2] / "containers" / "upstream"


def int8(folder: Path, gpu: str) -> Ask:
    return Ask(quantized(folder, "int8"), {"engine": "vllm", "gpu": gpu})


def int8_on_blackwell(folder: Path) -> Ask:
    ask = int8(folder, "b300")
    return Ask(ask.model, ask.options, {"severity": "error", "count": 14})


def int8_on_hopper(folder: Path) -> Ask:
    return int8(folder, "h100")


def fp8_on(folder: Path, gpu: str, **expect: object) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic"), {"engine": "vllm", "gpu": gpu}, dict(expect))


def fp8_on_ampere(folder: Path) -> Ask:
    said = "vLLM 0.32.0 on a100 computes fp8_channel with fp8_token inputs as bf16: weight only"
    return fp8_on(folder, "a100", severity="warning", said=said, count=14)


def fp8_on_ada(folder: Path) -> Ask:
    return fp8_on(folder, "l4")


def loads(folder: Path) -> Ask:
    said = "vLLM 0.32.0 on l4 loads fp8_channel with fp8_token inputs through CutlassFP8: fp8"
    return fp8_on(folder, "l4", severity="info", said=said)


def wide(folder: Path) -> Ask:
    return Ask(parent(folder), {"engine": "vllm", "gpu": "l4"})


def upstream(name: str, **options: object) -> Ask:
    return Ask(UPSTREAM / name, dict(options))


def three_bits(folder: Path) -> Ask:
    return Ask(UPSTREAM / "compressed_tensors_w3a16", {"engine": "vllm"}, {"severity": "warning"})


def four_bits(folder: Path) -> Ask:
    return upstream("compressed_tensors_w4a16", engine="vllm")


def rotations(folder: Path) -> Ask:
    ask = upstream("compressed_tensors_spinquant_w4a16", engine="sglang")
    return Ask(
        ask.model, ask.options, {"severity": "error", "said": "SGLang does not compute transforms at input"}
    )


def rotations_in_vllm(folder: Path) -> Ask:
    return upstream("compressed_tensors_spinquant_w4a16", engine="vllm")


def act_order(folder: Path) -> Ask:
    ask = upstream("gptq_v1_4bit_asym_desc_act", engine="vllm")
    return Ask(ask.model, ask.options, {"severity": "error", "count": 7})


def no_act_order(folder: Path) -> Ask:
    return upstream("gptq_v1_4bit_sym", engine="vllm")


def cache_for_heads(folder: Path) -> Ask:
    ask = upstream("compressed_tensors_fp8_dynamic_kv_heads", engine="tensorrt-llm")
    return Ask(ask.model, ask.options, {"got": "KV cache in fp8_head"})


def cache_for_the_tensor(folder: Path) -> Ask:
    return upstream("compressed_tensors_fp8_kv", engine="tensorrt-llm")


def other_bytes(folder: Path) -> Ask:
    return fp8_on(folder, "mi300x", severity="info", count=14)


def same_bytes(folder: Path) -> Ask:
    return fp8_on(folder, "mi355x")


def no_bf16(folder: Path) -> Ask:
    return Ask(parent(folder), {"gpu": "t4", "engine": "vllm"}, {"severity": "error"})


def bf16(folder: Path) -> Ask:
    return Ask(parent(folder), {"gpu": "l4", "engine": "vllm"})


def large(folder: Path, rows: int) -> Path:
    """Rows of 64 KiB of zeros, in a file with a hole."""
    columns = 1 << 15
    size = 2 * rows * columns
    header = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}
    }
    text = json.dumps(header).encode()
    model = folder / "large"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return model


def too_large(folder: Path) -> Ask:
    return Ask(large(folder, 1 << 18), {"gpu": "t4"}, {"got": "17.2 GB"})


def shared_out(folder: Path) -> Ask:
    """81.9 GB on each of two: more than an H100 is sold with, less than programs see of it."""
    return Ask(large(folder, 2_500_000), {"gpu": "h100", "tp": 2})


CASES = {
    "NC600": Case(int8_on_blackwell, int8_on_hopper),
    "NC601": Case(fp8_on_ampere, fp8_on_ada),
    "NC602": Case(loads, wide),
    "NC603": Case(three_bits, four_bits),
    "NC610": Case(rotations, rotations_in_vllm),
    "NC611": Case(act_order, no_act_order),
    "NC612": Case(cache_for_heads, cache_for_the_tensor),
    "NC613": Case(other_bytes, same_bytes),
    "NC614": Case(no_bf16, bf16),
    "NC615": Case(too_large, shared_out),
}
