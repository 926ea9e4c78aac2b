"""Attention in SGLang 0.5.23, TensorRT-LLM and transformers, as far as their source or documents say.

    SGLang        one backend by default: fa3 on Hopper, trtllm_mha on 10.x, aiter on AMD, else flashinfer, or triton
                  where the model has sinks; latents on fa3, flashinfer (10.x), aiter or triton
    TensorRT-LLM  which of its kernels runs is not known here, but that NVFP4 caches are for Blackwell
    transformers  its own cache in the model's dtype; caches of fewer bits are asked for in code

SGLang was read (arg_groups/model_override_base.py, kv_cache_hook.py, layers/attention), not run. An FP4 cache goes with
the backends that a check of its own names, and the default of 8.x, 9.0 and 12.x is not among them.
"""

from __future__ import annotations

from narrowcast.hardware.attention.row import WIDE, Attention, Backend, Order
from narrowcast.hardware.engines.row import CDNA3, CPU, ROCM, UNKNOWN, Reach, sm

_E4M3, _FP8 = ("fp8_e4m3",), ("fp8_e4m3", "fp8_e5m2")
_DECODED = "bf16: dequantized"
_SM10X, _ON_ROCM = sm(100, 109), Reach(archs=CDNA3)
_FP4_BLACKWELL = (
    "--kv-cache-dtype=nvfp4 requires Blackwell SM100 or SM120. Use --kv-cache-dtype=fp4_mx_block16 for the "
    "block-size-16 FP4 recipe."
)
_FP4_CHOICES = (
    "KV4 MHA expects attention_backend to be one of ['triton', 'torch_native', 'flex_attention', "
    "'trtllm_mha']"
)
_FP4_LATENT = "KV4 MLA expects attention_backend to be one of ['flashinfer', 'trtllm_mla']"
_MXFP8 = (
    "--kv-cache-dtype mxfp8 requires an SM100+ (Blackwell) GPU for the block-scaled operands used by the FA4 MXFP8 "
    "attention path."
)
_NAMED = "--attention-backend triton"


def _refusing(name: str, reach: Reach, modes: tuple[str, ...], failure: str, remedy: str) -> Backend:
    return Backend(name, reach, modes, UNKNOWN, failure=failure, remedy=remedy)


def _fp4(name: str, reach: Reach) -> tuple[Backend, ...]:
    """What a default backend other than trtllm_mha says of caches in four bits, and of MXFP8 before Blackwell."""
    return (
        _refusing(name, reach, ("fp4_mx_block16",), _FP4_CHOICES, _NAMED),
        _refusing(name, sm(0, 99), ("nvfp4",), _FP4_BLACKWELL, "fp8_e4m3"),
        _refusing(name, sm(120, 129), ("nvfp4",), _FP4_CHOICES, _NAMED),
        _refusing(name, sm(0, 99), ("mxfp8",), _MXFP8, "fp8_e4m3"),
        Backend(
            name, sm(100), ("mxfp8",), UNKNOWN, notes=("MXFP8 is the path of fa4: --attention-backend fa4",)
        ),
    )


_CAST = "the query is cast to the cache's FP8 without a scale"
_HEADS = (
    Backend("fa3", sm(90, 90), WIDE, "bf16"),
    Backend("fa3", sm(90, 90), _E4M3, "fp8", most=256, notes=(_CAST,)),
    Backend("fa3", sm(90, 90), ("fp8_e5m2",), UNKNOWN),
    *_fp4("fa3", sm(90, 90)),
    Backend("trtllm_mha", _SM10X, WIDE, "bf16"),
    Backend("trtllm_mha", _SM10X, _E4M3, "fp8", notes=("the query is quantized too",)),
    Backend("trtllm_mha", _SM10X, ("nvfp4",), "fp8", notes=("keys and values are read in four bits",)),
    Backend("trtllm_mha", _SM10X, ("fp8_e5m2", "fp4_mx_block16", "mxfp8"), UNKNOWN),
    Backend("flashinfer", sm(75), WIDE, "bf16", sinks=False),
    Backend("flashinfer", sm(80), _FP8, _DECODED, sinks=False, notes=("the query stays wide",)),
    *_fp4("flashinfer", sm(75)),
    Backend("triton", sm(75), WIDE, "bf16"),
    Backend("triton", sm(89), _FP8, "fp8", notes=("decode casts the query to the cache's FP8 without a scale",)),
    Backend("triton", sm(75, 88), _FP8, UNKNOWN, notes=("Triton has no E4M3 products before 8.9",)),
    Backend("aiter", _ON_ROCM, WIDE, "bf16"),
    Backend("aiter", _ON_ROCM, _FP8, UNKNOWN),
    _refusing("aiter", _ON_ROCM, ("nvfp4", "fp4_mx_block16"), "KV4 is not tested on non-CUDA platforms.", "fp8_e4m3"),
)  # fmt: skip
_LATENTS = (
    Backend("fa3 (latent)", sm(90, 90), WIDE, "bf16"),
    Backend("fa3 (latent)", sm(90, 90), _FP8, _DECODED, notes=("the cache is cast to 16 bits before the kernel",)),
    Backend("flashinfer (latent)", _SM10X, WIDE, "bf16"),
    Backend("flashinfer (latent)", _SM10X, _FP8, _DECODED, notes=("--attention-backend trtllm_mla multiplies in FP8",)),
    Backend("flashinfer (latent)", _SM10X, ("nvfp4", "fp4_mx_block16"), UNKNOWN),
    Backend("triton (latent)", sm(75), WIDE, "bf16"),
    Backend("triton (latent)", sm(89), _FP8, "fp8", notes=(_CAST,)),
    Backend("triton (latent)", sm(75, 88), _FP8, UNKNOWN),
    _refusing("triton (latent)", sm(0), ("nvfp4", "fp4_mx_block16"), _FP4_LATENT, "fp8_e4m3"),
    Backend("aiter (latent)", _ON_ROCM, WIDE, "bf16"),
    Backend("aiter (latent)", _ON_ROCM, _FP8, UNKNOWN),
)  # fmt: skip

SGLANG = Attention(
    "sglang", "0.5.23", "SGLang 0.5.23, srt/arg_groups and srt/layers/attention",
    (
        Order(sm(90, 90), "heads", ("fa3",)),
        Order(_SM10X, "heads", ("trtllm_mha",)),
        Order(_ON_ROCM, "heads", ("aiter",)),
        Order(sm(0), "heads", ("flashinfer", "triton")),
        Order(sm(90, 90), "latent", ("fa3 (latent)",)),
        Order(_SM10X, "latent", ("flashinfer (latent)",)),
        Order(_ON_ROCM, "latent", ("aiter (latent)",)),
        Order(sm(0), "latent", ("triton (latent)",)),
    ),
    (*_HEADS, *_LATENTS), "no attention backend on {gpu}: {reasons}",
)  # fmt: skip

_NOT_READ = (
    "its attention kernels were not read: which of them runs, and in which arithmetic, is not known here"
)
TENSORRT_LLM = Attention(
    "tensorrt-llm", "PyTorch backend, 2026", "NVIDIA/TensorRT-LLM, _torch/model_config.py and its documents",
    tuple(Order(sm(0), layout, ("TRTLLM",)) for layout in ("heads", "latent", "sparse")),
    (
        Backend("TRTLLM", sm(0), (*WIDE, *_E4M3, "int8"), UNKNOWN, notes=(_NOT_READ,)),
        Backend("TRTLLM", sm(100), ("nvfp4",), UNKNOWN, notes=(_NOT_READ,)),
    ),
    "no kernels for this cache on {gpu} ({reasons})",
)  # fmt: skip

_ANYWHERE = Reach(0, 999, ROCM + CPU)
TRANSFORMERS = Attention(
    "transformers", "5.24.0", "transformers 5.24.0, integrations/sdpa_attention.py and cache_utils.py",
    tuple(Order(_ANYWHERE, layout, ("sdpa",)) for layout in ("heads", "latent", "sparse")),
    (Backend("sdpa", _ANYWHERE, WIDE, "bf16"),),
    "the cache keeps the model's dtype; QuantizedCache is asked for in code ({reasons})",
)  # fmt: skip
