"""Run by .venv-peers: what ModelOpt's own classes make of checkpoints that narrowcast wrote.

python modelopt_peer.py FOLDER ...      writes FOLDER/theirs.npz, module to matrix in fp32, and says whether its
                                        conversion of hf_quant_config.json is the block in config.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "upstream"))


def main() -> None:
    from make_modelopt import decode
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from safetensors.torch import load_file

    for folder in map(Path, sys.argv[1:]):
        state = load_file(folder / "model.safetensors")
        modules = [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]
        np.savez(folder / "theirs.npz", **{module: decode(state, module).numpy() for module in modules})
        beside = json.loads((folder / "hf_quant_config.json").read_text())
        block = json.loads((folder / "config.json").read_text())["quantization_config"]
        print(json.dumps({"folder": folder.name, "equal": convert_hf_quant_config_format(beside) == block}))


if __name__ == "__main__":
    main()
