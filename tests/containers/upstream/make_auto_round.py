"""auto-round's own containers, rounded to nearest (``iters=0``) on a CPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from fixture import calibration, fresh, keep, narrow_config, toy_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedTokenizerFast
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

PACKAGES = ("auto-round", "transformers", "torch")


def plain(where: str) -> None:
    toy_model(torch.bfloat16, narrow_config()).save_pretrained(where)
    words = Tokenizer(WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(where)


def decode(where: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Layers that quantize their input say their weight; the others, applied to the identity, give it as it is."""
    model = AutoModelForCausalLM.from_pretrained(where, device_map="cpu")
    decoded: dict[str, torch.Tensor] = {}
    kind, how = "", ""
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if hasattr(module, "dequant_weight_online"):
            decoded[name], how = module.dequant_weight_online(), "dequant_weight_online"
        else:
            width = module.in_features if hasattr(module, "in_features") else module.infeatures
            with torch.inference_mode():
                decoded[name] = module(torch.eye(width, dtype=torch.float16)).T.contiguous()
            how = "applied to the identity in fp16"
    return decoded, f"{kind}, {how}"


def decode_block(where: Path) -> tuple[dict[str, torch.Tensor], str]:
    """auto-round cannot load what it writes here, so transformers' reader of the same tensors answers."""
    state = load_file(where / "model.safetensors")
    step = Fp8Dequantize(FineGrainedFP8HfQuantizer(FineGrainedFP8Config()))
    modules = [key.removesuffix(".weight_scale_inv") for key in state if key.endswith(".weight_scale_inv")]
    decoded = {
        m: step._dequantize_one(state[f"{m}.weight"], state[f"{m}.weight_scale_inv"], torch.float32)
        for m in modules
    }
    return decoded, "transformers' Fp8Dequantize to fp32, auto-round failing to load the file it wrote"


def write(name: str, scheme: str, form: str, **settings: Any) -> None:
    where = fresh(f"auto_round_{name}")
    prompts = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in calibration(8)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            plain(f"{folder}/toy")
            rounder = AutoRound(
                f"{folder}/toy", scheme=scheme, iters=0, disable_opt_rtn=True, nsamples=8, seqlen=12, batch_size=1,
                dataset=DataLoader(prompts, batch_size=None), device_map="cpu", **settings,
            )  # fmt: skip
            rounder.quantize_and_save(f"{folder}/out", format=form)
            made = next(Path(folder, "out").rglob("config.json")).parent
            for kept in ("config.json", "quantization_config.json", "model.safetensors"):
                shutil.copyfile(made / kept, where / kept)
        values, how = decode_block(where) if scheme == "FP8_BLOCK" else decode(where)
        made_by = f"AutoRound({scheme}, {settings}, iters=0).quantize_and_save({form})"
        keep(where.name, values, made_by, how, PACKAGES)
    except Exception as problem:
        print(f"{where.name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(where)


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())  # it leaves a work space where it runs
    write("w4a16_gptq", "W4A16", "auto_round:auto_gptq", group_size=16)
    write("w4a16_gptq_asym", "W4A16", "auto_round:auto_gptq", group_size=16, sym=False)
    write("w4a16_awq", "W4A16", "auto_round:auto_awq", group_size=16, sym=False)
    write("mxfp4", "MXFP4", "auto_round")
    write("nvfp4", "NVFP4", "auto_round")
    write("fp8_block", "FP8_BLOCK", "auto_round", group_size=(32, 32), act_group_size=32)
