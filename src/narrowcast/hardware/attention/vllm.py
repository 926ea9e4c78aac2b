"""vLLM 0.32's attention backends: who is tried before whom on a GPU, with which caches, and in which arithmetic.

    Hopper        FlashAttention 3 quantizes the query and multiplies in FP8 over an FP8 cache
    Blackwell     FlashInfer (TensorRT-LLM's kernels) does the same, from NVFP4 caches too
    Ampere, Ada   FlashAttention 2 has no FP8 cache; FlashInfer takes over and decodes it to 16 bits
    other heads   Triton, which multiplies FP8 in FP8 and refuses it before Ada

The scales of a token and a head (``*_per_token_head``), TurboQuant and UltraQuant are decoded in the kernel. Latents
have backends of their own, of which FlashMLA, CUTLASS and FlashInfer multiply in FP8 and Triton decodes.

Read from the 0.32.0 wheel (platforms, v1/attention), not run on a GPU. Left out: B12X, HPC and FlashAttention with
unequal K and V, which are asked for by name; multimodal prefixes and context parallelism, which change the order.
"""

from __future__ import annotations

from dataclasses import replace

from narrowcast.hardware.attention.row import WIDE, Attention, Backend, Order
from narrowcast.hardware.engines.row import CDNA3, CPU, CUDA, ROCM, UNKNOWN, Reach, sm

_E4M3, _E5M2 = ("fp8_e4m3",), ("fp8_e5m2",)
_FP8_HEAD = ("fp8_e4m3", "fp8_head")
_FLASHINFER_HEADS = (64, 128, 256, 512)
_DECODED = "bf16: dequantized"
_TURBO = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
_AITER = "aiter (with VLLM_ROCM_USE_AITER=1)"
_SM10X, _SM12X = sm(100, 109), sm(120, 129)
_ON_ROCM, _ON_CPU = Reach(archs=ROCM), Reach(archs=CPU)
_Q_SCALE = "the query is quantized too, with q_scale: k_scale where the checkpoint brings none"
_BEFORE_ADA = (
    "FP8 KV cache is not supported by the Triton attention backend: native FP8 (fp8e4nv) requires SM89+. "
    "Re-run with --kv-cache-dtype bfloat16."
)
_ASSERTS = (
    "AssertionError at the first forward pass: queries are quantized for fp8 and fp8_e4m3 only, and fp8_e5m2 asks for "
    "it here"
)
_MLA_PREFILL = "prefill multiplies in 16 bits unless attention_config.use_prefill_query_quantization is set"

_FLASH_ATTN = (
    Backend("FLASH_ATTN", sm(90, 90), WIDE, "bf16", multiple=8, most=256, notes=("FlashAttention 3",)),
    Backend("FLASH_ATTN", sm(90, 90), WIDE, "bf16", multiple=8, most=512, notes=("FlashAttention 4",)),
    Backend("FLASH_ATTN", _SM10X, WIDE, "bf16", multiple=8, most=512),
    Backend("FLASH_ATTN", sm(80), WIDE, "bf16", multiple=8, most=256, sinks=False, notes=("FlashAttention 2",)),
    Backend(
        "FLASH_ATTN", sm(90, 90), _FP8_HEAD, "fp8", multiple=8, most=256, notes=("FlashAttention 3", _Q_SCALE)
    ),
    Backend(
        "FLASH_ATTN", sm(90, 90), _FP8_HEAD, _DECODED, heads=(512,),
        notes=("FlashAttention 4 decodes keys and values and keeps the query wide",),
    ),
    Backend(
        "FLASH_ATTN", _SM10X, _FP8_HEAD, "fp8", multiple=8, most=128, notes=("FlashAttention 4", _Q_SCALE)
    ),
)  # fmt: skip

_FLASHINFER = (
    Backend("FLASHINFER", sm(80, 89), WIDE, "bf16", heads=_FLASHINFER_HEADS, sinks=False),
    Backend("FLASHINFER", sm(90, 121), WIDE, "bf16", heads=_FLASHINFER_HEADS),
    Backend("FLASHINFER", sm(80, 89), _E4M3 + _E5M2, _DECODED, heads=_FLASHINFER_HEADS, sinks=False),
    Backend(
        "FLASHINFER", sm(90, 90), _E4M3 + _E5M2, _DECODED, "fp8", heads=_FLASHINFER_HEADS,
        notes=("decode keeps the query wide, prefill quantizes it",),
    ),
    Backend("FLASHINFER", _SM10X, _E4M3, "fp8", heads=_FLASHINFER_HEADS, notes=(_Q_SCALE,)),
    Backend(
        "FLASHINFER", _SM10X, _E5M2, "fp8", heads=_FLASHINFER_HEADS, failure=_ASSERTS, remedy="--kv-cache-dtype fp8",
    ),
    Backend("FLASHINFER", sm(110, 121), _E4M3 + _E5M2, _DECODED, heads=_FLASHINFER_HEADS),
    *(
        Backend(
            "FLASHINFER", reach, ("nvfp4",), _DECODED, heads=_FLASHINFER_HEADS[1:], sinks=False,
            notes=("the query stays wide: FlashInfer's FA2 kernels decode the cache",),
        )
        for reach in (sm(80, 89), sm(90, 90), sm(120, 121))
    ),
    Backend(
        "FLASHINFER", _SM10X, ("nvfp4", "nvfp4_4over6"), "fp8", heads=_FLASHINFER_HEADS,
        notes=("the query is quantized to FP8; keys and values are read in four bits",),
    ),
)  # fmt: skip

_PER_TOKEN = ("int8_per_token_head", "int4_per_token_head")
_FP8_TOKEN = ("fp8_per_token_head",)
_TRITON_CUDA = (
    Backend("TRITON_ATTN", CUDA, WIDE, "bf16", least=32),
    Backend("TRITON_ATTN", sm(89), _E4M3, "fp8", least=32, notes=(_Q_SCALE,)),
    Backend(
        "TRITON_ATTN", sm(0, 88), _E4M3 + _E5M2 + _FP8_TOKEN, _DECODED, least=32, failure=_BEFORE_ADA,
        remedy="--kv-cache-dtype bfloat16, or int8_per_token_head",
    ),
    Backend(
        "TRITON_ATTN", sm(89), _E5M2, "fp8", least=32, failure=_ASSERTS, remedy="--kv-cache-dtype fp8",
    ),
    Backend("TRITON_ATTN", CUDA, _PER_TOKEN, _DECODED, least=32),
    Backend("TRITON_ATTN", sm(89), _FP8_TOKEN, _DECODED, least=32),
)  # fmt: skip
_FLEX = (Backend("FLEX_ATTENTION", CUDA, WIDE, "bf16", sinks=False),)
_TURBOQUANT = (
    Backend("TURBOQUANT", CUDA, _TURBO, "fp32: dequantized", sinks=False, sliding=False),
    Backend("TURBOQUANT", _ON_ROCM, _TURBO, _DECODED, sinks=False, sliding=False),
)

# MI250 has no FP8 instructions, and what its kernels make of an FP8 cache was not looked at.
_OLD, _NEW = Reach(archs=("gfx90a",)), Reach(archs=CDNA3)
_E5M2_NAME = "the bytes are read as the GPU's E4M3 whatever the mode is called; fp8 says what it is"
_ROCM_HEADS = (32, 64, 80, 96, 128, 160, 192, 224, 256)


def _rocm(name: str, **more: object) -> tuple[Backend, ...]:
    """A backend with wide caches on every AMD GPU and FP8 ones on those with FP8."""
    wide = replace(Backend(name, _ON_ROCM, WIDE, "bf16"), **more)  # type: ignore[arg-type]
    return (
        wide,
        replace(wide, reach=_NEW, modes=_E4M3, arithmetic=_DECODED),
        replace(wide, reach=_NEW, modes=_E5M2, arithmetic=_DECODED, notes=(_E5M2_NAME,)),
        replace(wide, reach=_OLD, modes=_E4M3 + _E5M2, arithmetic=UNKNOWN),
    )


_ROCM_ROWS = (
    *_rocm("ROCM_ATTN", heads=_ROCM_HEADS, sinks=False),
    *(
        replace(row, reach=_NEW, arithmetic=row.arithmetic if row.modes == WIDE else UNKNOWN)
        for row in _rocm("ROCM_AITER_FA", heads=(64, 128, 256), package=_AITER)[:3]
    ),
    *(replace(row, reach=_NEW) for row in _rocm("ROCM_AITER_UNIFIED_ATTN", least=32, package="aiter")[:3]),
    *_rocm("TRITON_ATTN", least=32),
    Backend("TRITON_ATTN", _ON_ROCM, _PER_TOKEN + _FP8_TOKEN, _DECODED, least=32),
    Backend("ULTRAQUANT", _ON_ROCM, ("ultraquant_4bit",), _DECODED, sinks=False, sliding=False),
)

_LATENT = (
    Backend("FLASHINFER_MLA", _SM10X, WIDE, "bf16"),
    Backend("FLASHINFER_MLA", _SM10X, _E4M3, "fp8", "bf16", notes=(_Q_SCALE, _MLA_PREFILL)),
    Backend("TOKENSPEED_MLA", _SM10X, _E4M3, "fp8", "bf16", package="tokenspeed-mla"),
    Backend("CUTLASS_MLA", _SM10X, WIDE, "bf16"),
    Backend("CUTLASS_MLA", _SM10X, _E4M3, "fp8", "bf16", notes=(_Q_SCALE, _MLA_PREFILL)),
    Backend("FLASH_ATTN_MLA", sm(90, 90), WIDE, "bf16"),
    Backend("FLASHMLA", sm(90, 90), WIDE, "bf16"),
    Backend("FLASHMLA", sm(90, 90), _E4M3, "fp8", "bf16", notes=(_Q_SCALE, _MLA_PREFILL)),
    Backend("TRITON_MLA", CUDA, WIDE, "bf16"),
    Backend("TRITON_MLA", sm(89), _E4M3, _DECODED),
    Backend(
        "TRITON_MLA", sm(0, 88), _E4M3, _DECODED, remedy="--kv-cache-dtype bfloat16",
        failure=_BEFORE_ADA.replace("Triton attention", "Triton MLA"),
    ),
    *(replace(row, reach=_NEW, package=_AITER) for row in _rocm("ROCM_AITER_MLA")[:3]),
    *(row for row in _rocm("TRITON_MLA") if row.modes in (WIDE, _E4M3)),
    Backend("TRITON_MLA", _OLD, _E4M3, UNKNOWN),
    Backend("AMX_MLA", _ON_CPU, WIDE, "bf16", heads=(576,), notes=("needs AMX; CPU_MLA without",)),
    Backend("CPU_MLA", _ON_CPU, WIDE, "bf16", heads=(576,)),
)  # fmt: skip

_PACKED = ("fp8_ds_mla",)
_ALIAS = "fp8 is stored as fp8_ds_mla: 512 codes with four scales, and the rotary part in bf16"
_SPARSE = (
    Backend("FLASHINFER_MLA_SPARSE", _SM10X, WIDE, "bf16"),
    Backend("FLASHINFER_MLA_SPARSE", _SM10X, _E4M3, "fp8", notes=(_Q_SCALE,)),
    Backend("FLASHMLA_SPARSE", sm(90, 109), WIDE + _PACKED, _DECODED, heads=(512, 576)),
    Backend("FLASHMLA_SPARSE", sm(90, 109), _E4M3, _DECODED, heads=(576,), notes=(_ALIAS,)),
    Backend("FLASHMLA_SPARSE", _SM10X, ("nvfp4_ds_mla",), _DECODED, heads=(576,)),
    Backend("FLASH_ATTN_MLA_SPARSE", sm(90, 90), WIDE, "bf16"),
    Backend("FLASHINFER_MLA_SPARSE_SM90", sm(90, 90), WIDE, "bf16", heads=(512, 576)),
    Backend("FLASHINFER_MLA_SPARSE_SM90", sm(90, 90), _E4M3, UNKNOWN, heads=(512, 576)),
    Backend("FLASHINFER_MLA_SPARSE_SM120", _SM12X, WIDE, "bf16"),
    Backend("FLASHINFER_MLA_SPARSE_SM120", _SM12X, _E4M3 + _PACKED, UNKNOWN),
    *(
        replace(row, reach=_NEW, package=_AITER, arithmetic=row.arithmetic if row.modes == WIDE else UNKNOWN)
        for row in _rocm("ROCM_AITER_MLA_SPARSE")[:2]
    ),
)

_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_ROWS = (
    Backend("CPU_ATTN", _ON_CPU, WIDE, "bf16", heads=_CPU_HEADS),
    Backend(
        "CPU_ATTN", _ON_CPU, _E4M3 + _E5M2, _DECODED, heads=_CPU_HEADS, multiple=32,
        notes=("needs AVX-512 or AMX",),
    ),
    Backend(
        "CPU_ATTN", _ON_CPU, _E4M3 + _E5M2, _DECODED, heads=_CPU_HEADS, remedy="--kv-cache-dtype bfloat16",
        failure="NotImplementedError: FP8 KV cache requires head_size divisible by 32 on CPU.",
    ),
)  # fmt: skip

_TAIL = ("TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")
_MLA_9 = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
_SPARSE_9 = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90")
ORDERS = (
    Order(_SM10X, "heads", ("FLASHINFER", "FLASH_ATTN", *_TAIL)),
    Order(CUDA, "heads", ("FLASH_ATTN", "FLASHINFER", *_TAIL)),
    Order(
        _ON_ROCM, "heads",
        ("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN", "TURBOQUANT", "ULTRAQUANT"),
    ),
    Order(_ON_CPU, "heads", ("CPU_ATTN",)),
    Order(
        _SM10X, "latent",
        ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"),
    ),
    Order(_SM12X, "latent", ("TRITON_MLA",)),
    Order(CUDA, "latent", _MLA_9),
    Order(_ON_ROCM, "latent", ("ROCM_AITER_MLA", "TRITON_MLA")),
    Order(_ON_CPU, "latent", ("AMX_MLA", "CPU_MLA")),
    Order(_SM10X, "sparse", ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"), "quantized"),
    Order(_SM10X, "sparse", ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"), "wide"),
    Order(_SM12X, "sparse", ("FLASHINFER_MLA_SPARSE_SM120",)),
    Order(CUDA, "sparse", _SPARSE_9),
    Order(_ON_ROCM, "sparse", ("ROCM_AITER_MLA_SPARSE",)),
)  # fmt: skip

ATTENTION = Attention(
    "vllm", "0.32.0", "vLLM 0.32.0, platforms and v1/attention/backends", ORDERS,
    (*_FLASH_ATTN, *_FLASHINFER, *_TRITON_CUDA, *_FLEX, *_TURBOQUANT, *_ROCM_ROWS, *_LATENT, *_SPARSE, *_CPU_ROWS),
    "No valid attention backend found for {gpu}. Reasons: {reasons}",
)  # fmt: skip
