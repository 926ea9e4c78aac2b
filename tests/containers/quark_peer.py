"""Run by .venv-upstream: what AMD Quark's own importer makes of checkpoints that narrowcast wrote.

python quark_peer.py FOLDER ...      writes FOLDER/theirs.npz, module to matrix in fp32
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch


def main() -> None:
    from quark.torch import import_model_from_safetensors
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
    from transformers import AutoConfig, AutoModelForCausalLM

    for folder in map(Path, sys.argv[1:]):
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        loaded = import_model_from_safetensors(model, str(folder), device="cpu")
        layers = {n: m for n, m in loaded.named_modules() if isinstance(m, QParamsLinear)}
        with torch.inference_mode():
            values = {n: m._get_qweight(m.weight).float().numpy() for n, m in layers.items()}
            kept = [n for n, m in loaded.named_modules() if type(m) is torch.nn.Linear]
        np.savez(folder / "theirs.npz", **values)
        print(json.dumps({"folder": folder.name, "modules": len(values), "kept": kept}))


if __name__ == "__main__":
    main()
