"""What AutoRound writes of a model, for tests/audit/test_peers.py: python save_auto_round.py MODEL OUT [NAMES].

Runs in an environment with auto-round on a CPU, without tuning (iters=0); each checkpoint becomes OUT/NAME/SOMETHING,
as AutoRound calls it. Calibration text is this repository's own pages.
"""

import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoTokenizer

PAGES = Path(__file__).parents[2] / "docs"
SCHEMES = {
    "ar-w4a16": ("W4A16", "auto_round"),
    "ar-w4a16-gptq": ("W4A16", "auto_gptq"),
    "ar-nvfp4": ("NVFP4", "auto_round"),
    "ar-mxfp4": ("MXFP4", "auto_round"),
    "ar-fp8-block": ("FP8_BLOCK", "auto_round"),
}


def main(source: str, out: str, *names: str) -> None:
    text = "".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(text)["input_ids"][:2048]).reshape(8, 1, 256)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    for name in names or SCHEMES:
        scheme, form = SCHEMES[name]
        rounder = AutoRound(
            source, scheme=scheme, iters=0, dataset=rows, nsamples=8, seqlen=256, device_map="cpu"
        )
        rounder.quantize_and_save(f"{out}/{name}", format=form)


if __name__ == "__main__":
    main(*sys.argv[1:])
