"""What llm-compressor writes, for tests/audit/test_peers.py: python save_llm_compressor.py MODEL OUT [NAMES].

Runs in .venv-peers on a CPU; each checkpoint becomes OUT/NAME. Calibration text is this repository's own pages.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGES = Path(__file__).parents[2] / "docs"
HEAD = ["lm_head"]
# Of SmolLM2-135M only down_proj has columns that groups of 128 divide.
NARROW = [*HEAD, "re:.*self_attn.*", "re:.*gate_proj", "re:.*up_proj"]
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
PLAIN, GPTQ = QuantizationModifier, GPTQModifier
RECIPES = {
    "llmc-fp8-dynamic": (PLAIN, {"scheme": "FP8_DYNAMIC", "ignore": HEAD}),
    "llmc-fp8-block": (PLAIN, {"scheme": "FP8_BLOCK", "ignore": HEAD}),
    "llmc-fp8-kv": (PLAIN, {"scheme": "FP8", "ignore": HEAD, "kv_cache_scheme": KV}),
    "llmc-fp8-head": (PLAIN, {"scheme": "FP8_DYNAMIC", "ignore": []}),
    "llmc-nvfp4": (PLAIN, {"scheme": "NVFP4", "ignore": HEAD}),
    "llmc-nvfp4a16": (PLAIN, {"scheme": "NVFP4A16", "ignore": HEAD}),
    "llmc-mxfp4": (PLAIN, {"scheme": "MXFP4", "ignore": HEAD}),
    "llmc-mxfp8": (PLAIN, {"scheme": "MXFP8", "ignore": HEAD}),
    "llmc-w8a8-gptq": (GPTQ, {"scheme": "W8A8", "ignore": HEAD}),
    "llmc-w4a16-gptq-some": (GPTQ, {"scheme": "W4A16", "ignore": NARROW}),
}


def main(source: str, out: str, *names: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer("".join(page.read_text() for page in sorted(PAGES.glob("*.md"))))["input_ids"]
    rows = [ids[i : i + 256] for i in range(0, 1024, 256)]
    text = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * 256} for row in rows])
    for name in names or RECIPES:
        modifier, settings = RECIPES[name]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        recipe = modifier(targets="Linear", **settings)
        oneshot(model=model, recipe=recipe, dataset=text, num_calibration_samples=4, max_seq_length=256)
        model.save_pretrained(f"{out}/{name}", save_compressed=True)
        tokenizer.save_pretrained(f"{out}/{name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
