"""FBGEMM fp8: transformers loads it only on a GPU, so the codes come from the formula and the config from its class."""

from __future__ import annotations

import json

import torch
from fixture import fresh, keep, narrow_config, toy_model
from safetensors.torch import save_file
from transformers import FbgemmFp8Config

if __name__ == "__main__":
    model = toy_model(config=narrow_config())
    where = fresh("fbgemm_fp8")
    state: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if "_proj" not in name:
            state |= {} if name == "lm_head.weight" else {name: value}
            continue
        amax = value.float().abs().amax(1, keepdim=True)
        scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / 448
        codes = (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        state |= {name: codes, f"{name}_scale": scale}
        values[name.removesuffix(".weight")] = codes.float() * scale
    model.config.save_pretrained(where)
    settings = json.loads((where / "config.json").read_text())
    settings["quantization_config"] = FbgemmFp8Config(modules_to_not_convert=["lm_head"]).to_dict()
    (where / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    keep(where.name, values, "derived: amax/448 per row; config block by FbgemmFp8Config.to_dict",
         "derived: code * scale", ("transformers", "torch"))  # fmt: skip
