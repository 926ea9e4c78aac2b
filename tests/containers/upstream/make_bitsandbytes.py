"""bitsandbytes through transformers: ``from_pretrained`` quantizes on a CPU, ``save_pretrained`` writes."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from fixture import HERE, fresh, keep, toy_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

PACKAGES = ("bitsandbytes", "transformers", "torch")


def decode(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """bf16 for 4 bit, code * SCB / 127 in fp32 for int8.

    The 4-bit blocks run over the flattened matrix, and it is decoded flat: given the two sides, the CPU kernel of
    0.50.2 takes the wrong absmax where a row is shorter than a block (down_proj here, 32 of 64).
    """
    decoded: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            state = copy.copy(module.weight.quant_state)
            shape, state.shape = state.shape, torch.Size([state.shape.numel()])
            decoded[name] = dequantize_4bit(module.weight.data, state).reshape(shape)
        elif isinstance(module, Linear8bitLt):
            scale = module.state.SCB if module.state.SCB is not None else module.weight.SCB
            decoded[name] = torch.ops.bitsandbytes.int8_vectorwise_dequant(module.weight.data, scale)
    return decoded


def write(name: str, **settings: Any) -> None:
    where = fresh(f"bitsandbytes_{name}")
    try:
        with tempfile.TemporaryDirectory() as plain:
            toy_model().save_pretrained(plain)
            model = AutoModelForCausalLM.from_pretrained(
                plain,
                quantization_config=BitsAndBytesConfig(**settings),
                device_map="cpu",
                dtype=torch.bfloat16,
            )
        model.save_pretrained(where)
        values = decode(model)
        again = decode(AutoModelForCausalLM.from_pretrained(where, device_map="cpu"))
        assert all(torch.equal(values[key], again[key]) for key in values)
        how = (
            "dequantize_4bit of the flattened matrix"
            if settings.get("load_in_4bit")
            else "int8_vectorwise_dequant"
        )
        keep(where.name, values, f"from_pretrained with BitsAndBytesConfig({settings}), save_pretrained, on a CPU",
             how, PACKAGES)  # fmt: skip
    except Exception as problem:
        print(f"{where.name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(HERE / where.name)


if __name__ == "__main__":
    four: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    write("nf4", **four, bnb_4bit_quant_type="nf4")
    write("nf4_double", **four, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    write("fp4", **four, bnb_4bit_quant_type="fp4")
    write("int8", load_in_8bit=True)
