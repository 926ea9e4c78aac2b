"""GPTQ v1 and v2 and AWQ as GPTQModel quantizes and saves a whole toy on a CPU, decoded by its own Torch layers.

The toy is narrower than elsewhere and every side of every matrix is a multiple of 32 (64 for AWQ), as the packers ask.
"""

from __future__ import annotations

import os

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from awq.utils.packing_utils import dequantize_gemm
from fixture import HERE, calibration, fresh, keep, narrow_config, toy_config, toy_model
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import METHOD
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PACKAGES = ("gptqmodel", "transformers", "torch")


def plain(where: str, width: int) -> None:
    wide = toy_config(hidden=64, inner=64, head_dim=64, num_attention_heads=1, num_key_value_heads=1)
    toy_model(torch.float16, wide if width == 64 else narrow_config()).save_pretrained(where)
    words = Tokenizer(WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(where)


def quantize(where: Path, config: QuantizeConfig) -> None:
    prompts = [
        {"input_ids": ids[0].tolist(), "attention_mask": [1] * ids.shape[1]} for ids in calibration(64)
    ]
    with tempfile.TemporaryDirectory() as source:
        plain(source, 64 if config.method == METHOD.AWQ else 32)
        model = GPTQModel.load(source, config, device="cpu", dtype=torch.float16)
        model.quantize(prompts, batch_size=1)
        model.save(str(where))


def decode_gptq(where: Path) -> dict[str, torch.Tensor]:
    """Its loader turns v1 into v2, its layer decodes to fp16 as [in, out]."""
    model = GPTQModel.load(str(where), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "qweight")}
    return {name: layer.dequantize_weight().T.contiguous() for name, layer in layers.items()}


def decode_awq(where: Path, group: int) -> dict[str, torch.Tensor]:
    """AutoAWQ's own unpacking of the file, [in, out] in fp16."""
    state = load_file(where / "model.safetensors")
    return {
        key.removesuffix(".qweight"): dequantize_gemm(
            state[key],
            state[key.replace("qweight", "qzeros")],
            state[key.replace("qweight", "scales")],
            4,
            group,
        ).T.contiguous()
        for key in state
        if key.endswith(".qweight")
    }


def write(name: str, **settings: Any) -> None:
    where = fresh(name)
    try:
        quantize(where, QuantizeConfig(group_size=16, offload_to_disk=False, **settings))
        if settings.get("method") == "awq":
            keep(name, decode_awq(where, 16), f"GPTQModel.quantize({settings}) and save, on a CPU",
                 "AutoAWQ's dequantize_gemm, transposed to [out, in]", (*PACKAGES, "autoawq"))  # fmt: skip
        else:
            keep(name, decode_gptq(where), f"GPTQModel.quantize({settings}) and save, on a CPU",
                 "TorchLinear.dequantize_weight, transposed to [out, in]", PACKAGES)  # fmt: skip
        for extra in ("quant_log.csv", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (where / extra).unlink(missing_ok=True)
    except Exception as problem:
        print(f"{name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(HERE / name)


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())  # it leaves logs where it runs
    write("gptq_v1_4bit_sym", bits=4, sym=True, desc_act=False, format="gptq")
    write("gptq_v1_4bit_asym_desc_act", bits=4, sym=False, desc_act=True, format="gptq")
    write("gptq_v2_4bit_asym", bits=4, sym=False, desc_act=False, format="gptq_v2")
    write("gptq_v2_4bit_sym_desc_act", bits=4, sym=True, desc_act=True, format="gptq_v2")
    write("gptq_v1_2bit_asym", bits=2, sym=False, desc_act=False, format="gptq")
    write("gptq_v1_3bit_asym", bits=3, sym=False, desc_act=False, format="gptq")
    write("gptq_v2_3bit_sym", bits=3, sym=True, desc_act=False, format="gptq_v2")
    write("gptq_v1_8bit_sym", bits=8, sym=True, desc_act=False, format="gptq")
    write("awq_gemm_asym", method="awq", format="gemm", bits=4, sym=False, desc_act=False)
