"""compressed-tensors as llm-compressor writes it: ``oneshot`` over four short prompts, ``save_pretrained``.

Groups of 128 are cut to 32 and blocks of 128x128 to 32x32, the toy being smaller than they are.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, preset_name_to_scheme
from compressed_tensors.utils.match import match_name
from datasets import Dataset
from fixture import HERE, calibration, fresh, keep, toy_model
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import SpinQuantModifier
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
MLP, ATTENTION = ["re:.*mlp.*_proj$"], ["re:.*self_attn.*_proj$"]


def scheme(preset: str, targets: list[str] | None = None, **weights: Any) -> Any:
    """A preset at the toy's size."""
    made = preset_name_to_scheme(preset, targets or ["Linear"])
    if made.weights.group_size == 128:
        made.weights.group_size = 32
    if made.weights.block_structure:
        made.weights.block_structure = [32, 32]
        if made.input_activations and made.input_activations.group_size:
            made.input_activations.group_size = 32
    for key, value in weights.items():
        setattr(made.weights, key, value)
    return made


def decode(where: Path) -> dict[str, torch.Tensor]:
    """The library's own config model, matching and decompressors."""
    config = QuantizationConfig.model_validate(
        json.loads((where / "config.json").read_text())["quantization_config"]
    )
    state = load_file(where / "model.safetensors")
    scales = [key for key in state if key.endswith(".weight_scale")]
    decoded: dict[str, torch.Tensor] = {}
    for module in (key.removesuffix(".weight_scale") for key in scales):
        group = next(
            g
            for g in config.config_groups.values()
            if any(t == "Linear" or match_name(module, t) for t in g.targets)
        )
        local = {k[len(module) + 1 :]: v for k, v in state.items() if k.startswith(f"{module}.")}
        compressor = BaseCompressor.get_value_from_registry(group.format or config.format)
        decoded[module] = compressor.decompress(local, group)["weight"]
    return decoded


def write(name: str, made: str, groups: list[Any], before: list[Any] | None = None, **settings: Any) -> None:
    tokens = {str(i): i for i in range(32)}
    processor = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(tokens, unk_token="0")), pad_token="0"
    )
    rows = [ids[0].tolist() for ids in calibration()]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    recipe = QuantizationModifier(
        config_groups={f"group_{i}": group for i, group in enumerate(groups)}, ignore=["lm_head"], **settings
    )
    where = fresh(f"compressed_tensors_{name}")
    try:
        with tempfile.TemporaryDirectory() as plain:
            toy_model().save_pretrained(plain)
            model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            oneshot(
                model=model, dataset=data, processor=processor, recipe=[*(before or []), recipe],
                num_calibration_samples=4, max_seq_length=12, pipeline="basic",
            )  # fmt: skip
            model.save_pretrained(where, save_compressed=True)
        (where / "recipe.yaml").unlink()
        keep(where.name, decode(where), f"oneshot: {made}; save_pretrained(save_compressed=True)",
             "the registered compressor's decompress", PACKAGES)  # fmt: skip
    except Exception as problem:
        print(f"{where.name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(HERE / where.name)


if __name__ == "__main__":
    static = QuantizationArgs(num_bits=8, type="int", symmetric=False, strategy="tensor", dynamic=False)
    asymmetric = scheme("W8A8")
    asymmetric.input_activations = static
    write("nvfp4_kv", "NVFP4, kv_cache_scheme FP8", [scheme("NVFP4")], kv_cache_scheme=KV)
    write("fp8_kv", "FP8 (static), kv_cache_scheme FP8", [scheme("FP8")], kv_cache_scheme=KV)
    write("fp8_dynamic_kv_heads", "FP8_DYNAMIC, kv_cache_scheme FP8 per head", [scheme("FP8_DYNAMIC")],
          kv_cache_scheme={**KV, "strategy": "attn_head"})  # fmt: skip
    write("fp8_block", "FP8_BLOCK, blocks of 32x32", [scheme("FP8_BLOCK")])
    write("int8_asym_input", "W8A8 with static asymmetric inputs", [asymmetric])
    write("w4a16", "W4A16, groups of 32", [scheme("W4A16")])
    write("w4a16_asym", "W4A16_ASYM, groups of 32", [scheme("W4A16_ASYM")])
    write("w3a16", "W3A16, groups of 32", [scheme("W3A16")])
    write("w4afp8", "W4AFP8, groups of 32", [scheme("W4AFP8")])
    write("mxfp4a16", "MXFP4A16", [scheme("MXFP4A16")])
    write("mxfp8a16", "MXFP8A16", [scheme("MXFP8A16")])
    write("mixed", "NVFP4A16 for the MLP, FP8_DYNAMIC for attention",
          [scheme("NVFP4A16", MLP), scheme("FP8_DYNAMIC", ATTENTION)])  # fmt: skip
    write("spinquant_w4a16", "SpinQuantModifier(R1, R2, R4, hadamard), W4A16, groups of 32", [scheme("W4A16")],
          [SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_type="hadamard")])  # fmt: skip
