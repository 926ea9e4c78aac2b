"""MXFP6A16, which only compressed-tensors 0.20 has: its scales and its compressor, applied to the toy's matrices."""

from __future__ import annotations

import json

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from fixture import fresh, keep, toy_model
from safetensors.torch import save_file

if __name__ == "__main__":
    scheme = preset_name_to_scheme("MXFP6A16", ["Linear"])
    scheme.format = "mxfp6-pack-quantized"
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    model = toy_model()
    where = fresh("compressed_tensors_mxfp6a16")
    state: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if "_proj" not in name:
            state |= {} if name == "lm_head.weight" else {name: value}
            continue
        blocks = value.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        module = name.removesuffix(".weight")
        packed = compressor.compress({"weight": value, "weight_scale": scale}, scheme)
        state |= {f"{module}.{key}": part for key, part in packed.items()}
        decoded[module] = compressor.decompress(packed, scheme)["weight"]
    model.config.save_pretrained(where)
    settings = json.loads((where / "config.json").read_text())
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=scheme.format,
        quantization_status="compressed",
    )
    settings["quantization_config"] = config.to_dict()
    (where / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n")
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    keep(where.name, decoded, "MXFP6A16: calculate_qparams and the registered compressor's compress",
         "the registered compressor's decompress", ("compressed-tensors", "transformers", "torch"))  # fmt: skip
