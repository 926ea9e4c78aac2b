"""What a quantization_config says of layers whose weights are not at hand, and what says no layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import toys
from narrowcast.errors import CheckpointError
from narrowcast.model.roles import Role
from narrowcast.serving.loading import load


def test_a_config_that_does_not_say_how_layers_are_stored_is_refused(tmp_path: Path) -> None:
    config = toys.llama_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"bitsandbytes(.|\n)*headers"):
        load(tmp_path)


# What public configs say; their weights are not at hand. Sources: the quantization_config blocks of
# deepseek-ai/DeepSeek-V3, TheBloke/Llama-2-7B-GPTQ, casperhansen/llama-3-8b-instruct-awq, nvidia's FP8 and FP4
# releases of Llama 3.1, RedHatAI's w4a16 and FP8 ones, meta-llama/Llama-3.1-405B-Instruct-FP8.
_LINEAR = {"targets": ["Linear"], "output_activations": None}
_W8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
_A8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
_W4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "dynamic": False,
    "strategy": "group",
    "group_size": 128,
}
PUBLIC = {
    "fp8 blocks": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [128, 128]}, "fp8_block128", "fp8_group128"),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor", "fp8_tensor"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
              "damp_percent": 0.1, "true_sequential": True}, "int4_g128", None),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
             "modules_to_not_convert": None}, "uint4_g128", None),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme":
                      {"num_bits": 8, "type": "float", "dynamic": False}, "ignore": ["lm_head"]},
                     "fp8_tensor", "fp8_tensor"),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4", "nvfp4"),
    "ct fp8": ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {**_LINEAR, "weights": _W8, "input_activations": _A8}}},
               "fp8_channel", "fp8_channel"),
    "ct w4a16": ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                  "config_groups": {"group_0": {**_LINEAR, "weights": _W4, "input_activations": None}}},
                 "int4_g128", None),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert":
                ["lm_head"]}, "fp8_channel", "fp8_token"),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLIC)
def test_public_configs_without_weights(tmp_path: Path, case: str) -> None:
    block, weight, inputs = PUBLIC[case]
    config = toys.llama_config(hidden=256, inner=512, head=True, quantization_config=block)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load(tmp_path)
    linears = {g.linear for g in found.groups if g.matrix.role in (Role.ATTENTION, Role.MLP)}
    assert {(x.weight.name, x.input.name if x.input else None) for x in linears if x} == {(weight, inputs)}
    assert {g.scheme for g in found.groups if g.matrix.role not in (Role.ATTENTION, Role.MLP)} == {"bf16"}
    assert found.kv == ("fp8_e4m3" if case == "modelopt fp8" else None)


SPOILED = {
    "block of one number": {"quant_method": "fp8", "weight_block_size": [128]},
    "block of nothing": {"quant_method": "fp8", "weight_block_size": [0, 0]},
    "block that is a number": {"quant_method": "fp8", "weight_block_size": 128},
    "block of words": {"quant_method": "fp8", "weight_block_size": [128, "wide"]},
    "another code": {"quant_method": "fp8", "fmt": "e5m2"},
    "no scheme of inputs": {"quant_method": "fp8", "activation_scheme": "wild"},
    "a float of three bits": {"quant_method": "compressed-tensors", "config_groups":
                              {"group_0": {**_LINEAR, "weights": {**_W8, "num_bits": 3}}}},
    "an integer of forty bits": {"quant_method": "compressed-tensors", "config_groups":
                                 {"group_0": {**_LINEAR, "weights": {**_W4, "num_bits": 40}}}},
    "inputs of forty bits": {"quant_method": "compressed-tensors", "config_groups":
                             {"group_0": {**_LINEAR, "weights": _W8, "input_activations": {**_A8, "type": "int",
                                                                                         "num_bits": 40}}}},
    "no expression": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:(": {"bits": 8}}},
    "no width": {"quant_method": "gptq", "bits": "four", "group_size": 128},
    "no group": {"quant_method": "gptq", "bits": 4, "group_size": 0},
    "group below nothing": {"quant_method": "awq", "bits": 4, "group_size": -5},
    "group that is a flag": {"quant_method": "gptq", "bits": 4, "group_size": True},
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_words_that_say_no_layer_are_refused(tmp_path: Path, case: str) -> None:
    config = toys.llama_config(hidden=256, inner=512, head=True, quantization_config=SPOILED[case])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_a_cache_that_no_engine_has_is_told(tmp_path: Path) -> None:
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "wild"}
    config = toys.llama_config(hidden=256, inner=512, head=True, quantization_config=block)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load(tmp_path)
    assert found.kv is None
    assert any("wild" in note for note in found.notes)
