"""AMD Quark: quantize over four short prompts, freeze, ``export_safetensors``; read back by Quark's own importer."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from fixture import calibration, fresh, keep, narrow_config, toy_model
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)
from torch.utils.data import DataLoader

PACKAGES = ("amd-quark", "transformers", "torch")


def write(name: str, made: str, layer: QLayerConfig, **settings: Any) -> None:
    where = fresh(f"quark_{name}")
    try:
        config = QConfig(global_quant_config=layer, exclude=["lm_head"], **settings)
        quantizer = ModelQuantizer(config)
        prompts = DataLoader([ids[0] for ids in calibration()], batch_size=1)
        model = quantizer.freeze(quantizer.quantize_model(toy_model(config=narrow_config()), prompts))
        export_safetensors(model, str(where))
        loaded = import_model_from_safetensors(toy_model(config=narrow_config()), str(where), device="cpu")
        layers = {n: m for n, m in loaded.named_modules() if isinstance(m, QParamsLinear)}
        with torch.inference_mode():
            values = {n: m._get_qweight(m.weight).contiguous() for n, m in layers.items()}
        keep(where.name, values, f"ModelQuantizer({made}), freeze, export_safetensors",
             "import_model_from_safetensors, QParamsLinear._get_qweight", PACKAGES)  # fmt: skip
    except Exception as problem:
        print(f"{where.name}: not made, {type(problem).__name__}: {problem}")
        shutil.rmtree(where)


if __name__ == "__main__":
    fp8 = FP8E4M3PerTensorSpec().to_quantization_spec()
    cached = {
        pattern: QLayerConfig(weight=fp8, input_tensors=fp8, output_tensors=fp8)
        for pattern in ("*k_proj", "*v_proj")
    }
    mxfp4, dynamic = (OCP_MXFP4Spec(ch_axis=-1, is_dynamic=d).to_quantization_spec() for d in (False, True))
    mxfp6 = OCP_MXFP6E2M3Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    int4 = Int4PerGroupSpec(ch_axis=-1, group_size=16).to_quantization_spec()
    uint4 = Uint4PerGroupSpec(ch_axis=-1, group_size=16).to_quantization_spec()
    write("fp8_kv", "FP8E4M3PerTensorSpec static, KV cache in FP8", QLayerConfig(weight=fp8, input_tensors=fp8),
          layer_quant_config=cached, kv_cache_quant_config=cached, kv_cache_group=["*k_proj", "*v_proj"])  # fmt: skip
    write("mxfp4", "OCP_MXFP4Spec for weights and inputs", QLayerConfig(weight=mxfp4, input_tensors=dynamic))
    write("mxfp6_e2m3", "OCP_MXFP6E2M3Spec for weights", QLayerConfig(weight=mxfp6))
    write("int4", "Int4PerGroupSpec, groups of 16", QLayerConfig(weight=int4))
    write("uint4_asym", "Uint4PerGroupSpec, groups of 16", QLayerConfig(weight=uint4))
