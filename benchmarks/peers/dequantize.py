"""transformers decodes a native FP8 checkpoint to BF16 on the CPU: python dequantize.py MODEL OUT."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config


def main() -> None:
    """Load with the quantizer's own decoding, save."""
    config = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(sys.argv[2])


if __name__ == "__main__":
    main()
