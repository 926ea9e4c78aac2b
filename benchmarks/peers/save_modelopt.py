"""What ModelOpt writes of a model, for tests/audit/test_peers.py: python save_modelopt.py MODEL OUT [NAMES].

Runs in .venv-peers on a CPU; each checkpoint becomes OUT/NAME. Calibration text is this repository's own pages.
"""

import copy
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGES = Path(__file__).parents[2] / "docs"
CONFIGS = {  # the preset, and whether the KV cache is FP8
    "mo-fp8-kv": ("FP8_DEFAULT_CFG", True),
    "mo-nvfp4": ("NVFP4_DEFAULT_CFG", False),
    "mo-nvfp4-kv8": ("NVFP4_DEFAULT_CFG", True),
    "mo-int4-awq": ("INT4_AWQ_CFG", False),
    "mo-mxfp8": ("MXFP8_DEFAULT_CFG", False),
}


def narrower(config: object) -> None:
    """Groups of 64, which divide the columns of SmolLM2-135M, in place of 128."""
    if isinstance(config, dict) and config.get(-1) == 128:
        config[-1] = 64
    inner = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
    for one in inner:
        narrower(one)


def main(source: str, out: str, *names: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    text = "".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    ids = torch.tensor(tokenizer(text)["input_ids"][:1024]).reshape(4, 1, 256)
    for name in names or CONFIGS:
        preset, cache = CONFIGS[name]
        config = copy.deepcopy(getattr(mtq, preset))
        if name == "mo-int4-awq":
            narrower(config)
        if cache:
            config["quant_cfg"] = [*config["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        model = mtq.quantize(model, config, lambda model: [model(row) for row in ids])
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=f"{out}/{name}")
        tokenizer.save_pretrained(f"{out}/{name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
