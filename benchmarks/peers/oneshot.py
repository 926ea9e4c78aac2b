"""llm-compressor's standard path, through a transformers model: python oneshot.py MODEL OUT SCHEME."""

import sys

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    source, out, scheme = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    model.save_pretrained(out, save_compressed=True)
