"""What GPTQModel writes of a model, for tests/audit/test_peers.py: python save_gptqmodel.py MODEL OUT [NAMES].

Runs in an environment with gptqmodel on a CPU; each checkpoint becomes OUT/NAME. Calibration text is this repository's
own pages.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from transformers import AutoTokenizer

PAGES = Path(__file__).parents[2] / "docs"
SETTINGS = {
    "gq-gptq-v1": {"sym": True, "desc_act": False, "format": "gptq"},
    "gq-gptq-v2-asym": {"sym": False, "desc_act": False, "format": "gptq_v2"},
    "gq-gptq-act": {"sym": True, "desc_act": True, "format": "gptq"},
}


def main(source: str, out: str, *names: str) -> None:
    text = "".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    ids = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    rows = [{"input_ids": ids[i : i + 256], "attention_mask": [1] * 256} for i in range(0, 1536, 256)]
    source, out = str(Path(source).resolve()), str(Path(out).resolve())
    os.chdir(tempfile.mkdtemp())  # it leaves logs where it runs
    for name in names or SETTINGS:
        config = QuantizeConfig(bits=4, group_size=64, offload_to_disk=False, **SETTINGS[name])
        model = GPTQModel.load(source, config, device="cpu", dtype=torch.bfloat16)
        model.quantize(rows, batch_size=1)
        model.save(f"{out}/{name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
