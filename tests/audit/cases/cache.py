"""Cases of the rules about the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from audit.asking import Ask, Case
from audit.cases.scales_pieces import upstream
from audit.editing import edit, edit_config, parent, quantized

SCHEME = {
    "dynamic": False, "group_size": None, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float",
}  # fmt: skip
ATTENTION = "model.layers.{}.self_attn"


def scale(value: float | list[float]) -> tuple[str, np.ndarray]:
    """A stored scale, F32."""
    return "F32", np.atleast_1d(np.array(value, np.float32))


def cached(
    folder: Path, tensors: dict[str, Any], container: str = "compressed-tensors", **scheme: Any
) -> Path:
    """FP8 weights with an FP8 KV cache and these tensors of it."""
    model = quantized(folder, "fp8_dynamic", container)

    def ask(config: dict[str, Any]) -> None:
        config["quantization_config"]["kv_cache_scheme"] = SCHEME | scheme

    if container == "compressed-tensors":
        edit_config(model, ask)
    return edit(model, tensors)


def both(value: float = 0.05, layers: tuple[int, ...] = (0, 1), names: str = "kv") -> dict[str, Any]:
    """k_scale and v_scale on the attention of these layers."""
    return {f"{ATTENTION.format(layer)}.{which}_scale": scale(value) for layer in layers for which in names}


def no_scales(folder: Path) -> Ask:
    said = "the config asks for an fp8 KV cache and there are no scales: engines take 1.0"
    return Ask(cached(folder, {}), expect={"said": said, "severity": "warning", "repair": "unity_kv"})


def with_scales(folder: Path) -> Ask:
    return Ask(cached(folder, both()))


def unity(folder: Path) -> Ask:
    model = cached(folder, both() | {f"{ATTENTION.format(1)}.k_scale": scale(1.0)})
    return Ask(model, expect={"tensor": f"{ATTENTION.format(1)}.k_scale", "severity": "warning"})


def near_unity(folder: Path) -> Ask:
    return Ask(cached(folder, both() | {f"{ATTENTION.format(1)}.k_scale": scale(1.0001)}))


def keys_alone(folder: Path) -> Ask:
    model = cached(folder, both(names="k"))
    return Ask(model, expect={"said": "a KV cache scale for k and none for v", "severity": "warning"})


def old_spelling(folder: Path) -> Ask:
    """AutoFP8's names, which vLLM reads in its own containers only."""
    names = {f"{ATTENTION.format(i)}.{w}_proj.output_scale": scale(0.05) for i in (0, 1) for w in "kv"}
    expect = {
        "said": "vLLM reads 0 of 4 KV cache scales",
        "severity": "warning",
        "repair": "kv_names",
        "count": 4,
    }
    return Ask(cached(folder, names), {"engine": "vllm"}, expect)


def own_spelling(folder: Path) -> Ask:
    return Ask(cached(folder, both()), {"engine": "vllm"})


def second_layer_without(folder: Path) -> Ask:
    said = "1 of 2 attention layers have KV cache scales, layers 1 have none"
    return Ask(cached(folder, both(layers=(0,))), expect={"said": said, "tensor": ATTENTION.format(1)})


def second_layer_linear(folder: Path) -> Ask:
    """A hybrid model, whose second layer keeps no keys."""
    model = cached(folder, both(layers=(0,)))
    edit_config(model, lambda config: config.update(layer_types=["full_attention", "linear_attention"]))
    return Ask(model)


def one_for_both(folder: Path) -> Ask:
    model = cached(folder, {f"{ATTENTION.format(i)}.kv_scale": scale(0.05) for i in (0, 1)})
    return Ask(model, expect={"said": "kv_scale is deprecated", "repair": "kv_names"})


def _heads(folder: Path, name: str, scheme: str) -> Path:
    model = upstream(folder, name)
    given = {f"{ATTENTION.format(0)}.{scheme.format(which)}": scale([0.01, 0.02]) for which in "kv"}
    return edit(model, given)


def heads_elsewhere(folder: Path) -> Ask:
    model = _heads(folder, "modelopt_fp8_kv", "{0}_proj.{0}_scale")
    return Ask(model, expect={"severity": "error", "got": "[2]", "said": "a KV cache scale of 2 numbers"})


def heads_at_home(folder: Path) -> Ask:
    return Ask(upstream(folder, "compressed_tensors_fp8_dynamic_kv_heads"))


def placeholder(folder: Path) -> Ask:
    model = cached(folder, both() | {f"{ATTENTION.format(0)}.v_scale": scale(-1.0)})
    return Ask(model, expect={"said": "the KV cache scale is -1", "severity": "error"})


def for_sglang(folder: Path) -> Ask:
    model = upstream(folder, "modelopt_nvfp4_kv_nvfp4")
    return Ask(model, {"engine": "sglang", "gpu": "b200"}, {"severity": "warning", "count": 2})


def for_sglang_elsewhere(folder: Path) -> Ask:
    model = upstream(folder, "modelopt_nvfp4_kv_nvfp4")
    return Ask(model, {"engine": "sglang", "gpu": "rtx pro 6000"})


def beside_parent(folder: Path) -> Ask:
    model = cached(folder, {})
    return Ask(model, {"against": parent(folder)}, {"severity": "info", "count": 2})


def wide_beside_parent(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic"), {"against": parent(folder)})


def sampled(folder: Path) -> Ask:
    """A scale of the file under which three of five keys saturate."""
    model = cached(folder, both(0.5))
    np.save(folder / "keys.npy", np.array([1000, -700, 300, 3.3, 0.01], np.float32))
    said = "K or V: 3 of 5 (60.00%) saturate under the largest scale of the file, model.layers.0.self_attn.k_scale"
    expect = {"severity": "warning", "said": said, "count": 3, "wanted": "k_scale 2.232143"}
    return Ask(model, {"kv_sample": folder / "keys.npy"}, expect)


def not_sampled(folder: Path) -> Ask:
    return Ask(cached(folder, both(0.5)))


CASES = {
    "NC200": Case(no_scales, with_scales),
    "NC201": Case(unity, near_unity),
    "NC202": Case(keys_alone, with_scales),
    "NC203": Case(old_spelling, own_spelling),
    "NC204": Case(second_layer_without, second_layer_linear),
    "NC205": Case(one_for_both, with_scales),
    "NC206": Case(heads_elsewhere, heads_at_home),
    "NC207": Case(placeholder, with_scales),
    "NC208": Case(for_sglang, for_sglang_elsewhere),
    "NC209": Case(beside_parent, wide_beside_parent),
    "NC210": Case(sampled, not_sampled),
}
