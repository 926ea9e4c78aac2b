"""What vLLM prints of what it runs. Names in ``source`` are paths below ``vllm/`` of the version given."""

from __future__ import annotations

from narrowcast.doctor.rows import VLLM, Expected, Fact

# The head of the line that repeats the whole configuration; V0 is versions before 0.8, without a letter before 0.7.
_CONFIG = r"Initializing an? (?:V\d )?LLM engine .*?"
_CORE = "vLLM 0.32 v1/engine/core.py"
_ORACLE = "vLLM 0.32 model_executor/layers/fused_moe/oracle/"
_LINEAR = "vLLM 0.32 model_executor/kernels/linear/__init__.py"


def _config(kind: str, regex: str) -> Fact:
    return Fact(kind, "{what}", VLLM, ("Initializing",), _CONFIG + regex, "vLLM 0.32 config/vllm.py")


_ABOUT = (
    Fact("version", "{what}", VLLM, ("Initializing",), r"LLM engine \(v(?P<what>[^)\s]+)\)", _CORE),
    Fact(
        "version",
        "{what}",
        VLLM,
        ("version",),
        r"vLLM (?:API |batch processing API )?(?:server )?version (?P<what>\d[^\s,]*)",
        "vLLM 0.32 entrypoints/serve/utils/api_utils.py",
    ),
    Fact(
        "version",
        "{what}",
        VLLM,
        ("version",),
        r"█\s+version (?P<what>\d\S*)",
        "vLLM 0.32 entrypoints/serve/utils/api_utils.py",
    ),
    _config("model", r"\bmodel='(?P<what>[^']+)'"),
    Fact(
        "architecture",
        "{what}",
        VLLM,
        ("Resolved",),
        r"Resolved architecture: (?P<what>\w+)",
        "vLLM 0.32 config/model.py",
    ),
    _config("device", r"\bdevice_config=(?P<what>\w+)"),
    _config("dtype", r"\bdtype=(?:torch\.)?(?P<what>\w+)"),
    _config("quantization", r"\bquantization=(?P<what>[\w-]+)"),
    _config("tensor parallel", r"\btensor_parallel_size=(?P<what>\d+)"),
)

_KERNELS = (
    Fact(
        "linear kernel",
        "{kernel} for {layer}",
        VLLM,
        ("Selected",),
        r"Selected (?P<kernel>\w+) for (?P<layer>\w+)",
        _LINEAR,
    ),
    Fact(
        "linear kernel",
        "{kernel} for {layer}",
        VLLM,
        ("Using",),
        r"Using (?P<kernel>\w+) for (?P<layer>mixed-precision linear|(?:MXFP8|MXFP4|MXFP6|NVFP4) GEMM)",
        _LINEAR,
    ),
    Fact(
        "linear kernel",
        "{kernel} for {layer}",
        VLLM,
        ("Using",),
        r"Using (?P<kernel>\w+) for "
        r"(?P<layer>(?:CompressedTensors|Auto(?:GPTQ|AWQ)|GPTQ|AWQ|Quark|ModelOpt|INC|Fp8)\w+)",
        "vLLM 0.32 model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py",
    ),
    Fact(
        "expert kernel",
        "{kernel} ({scheme})",
        VLLM,
        ("MoE",),
        r"Using '?(?P<kernel>[A-Za-z][\w ]{0,40}?)'? "
        r"(?P<scheme>Fp8|NvFp4|MxFp8|Mxfp4|Int8|WNA16|W4A8(?: Int8)?|Unquantized) MoE backend",
        _ORACLE + "fp8.py",
    ),
    Fact(
        "expert kernel",
        "{kernel}",
        VLLM,
        ("Using",),
        r"Using (?P<kernel>CompressedTensors\w+MoEMethod|\w+Experts\w*(?= (?:for (?:AutoRound "
        r")?MXFP4|MoE|MOE)))",
        "vLLM 0.32 model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/"
        "compressed_tensors_moe.py",
    ),
    Fact(
        "expert dispatch",
        "{what}",
        VLLM,
        ("Using",),
        r"Using (?P<what>\w*PrepareAndFinalize\w*)",
        _ORACLE + "fp8.py",
    ),
    Fact(
        "DeepGEMM scales",
        "E8M0 {what}",
        VLLM,
        ("DeepGEMM",),
        r"DeepGEMM E8M0 (?P<what>enabled|disabled)",
        "vLLM 0.32 utils/deep_gemm.py",
    ),
    Fact(
        "scale format",
        "{what}",
        VLLM,
        ("Detected",),
        r"Detected quantization_config\.scale_fmt=(?P<what>\w+); enabling UE8M0",
        "vLLM 0.32 transformers_utils/config.py",
    ),
    Fact(
        "online quantization",
        "took {what} s",
        VLLM,
        ("Online",),
        r"Online quantization as part of model loading took (?P<what>[\d.]+) seconds",
        "vLLM 0.32 model_executor/model_loader/base_loader.py",
    ),
)

_MEMORY = (
    Fact(
        "KV cache dtype",
        "{what}",
        VLLM,
        ("store",),
        r"Using (?P<what>\S+) data type to store kv cache",
        "vLLM 0.32 config/cache.py",
    ),
    _config("KV cache dtype", r"\bkv_cache_dtype=(?P<what>\w+)"),
    Fact(
        "attention",
        "{what}",
        VLLM,
        ("attention",),
        r"Using (?P<what>\w+) attention backend out of potential backends",
        "vLLM 0.32 platforms/cuda.py",
    ),
    Fact(
        "attention",
        "{what}",
        VLLM,
        ("backend",),
        r"Using (?P<what>[A-Z][A-Z0-9_]+|Flash ?Attention(?:-\d)?|FlashInfer|XFormers|Triton(?: MLA)?|"
        r"FlashMLA|Cutlass MLA|Torch SDPA) backend(?:\.?$| on V\d| out of potential| \(selected)",
        "vLLM 0.32 platforms/cuda.py",
    ),
    Fact(
        "attention",
        "FlashAttention {what}",
        VLLM,
        ("FlashAttention",),
        r"Using FlashAttention version (?P<what>\d\S*)",
        "vLLM 0.32 v1/attention/backends/flash_attn.py",
    ),
    Fact(
        "weights in memory",
        "{what} GiB",
        VLLM,
        ("loading", "Loading"),
        r"[Mm]odel (?:weights )?(?:loading )?took (?P<what>[\d.]+) Gi?B",
        "vLLM 0.32 v1/worker/gpu_model_runner.py",
    ),
    Fact(
        "memory for KV cache",
        "{what} GiB",
        VLLM,
        ("Available",),
        r"Available KV cache memory: (?P<what>-?[\d.]+) GiB",
        "vLLM 0.32 v1/worker/gpu_worker.py",
    ),
    Fact(
        "KV cache size",
        "{what} tokens",
        VLLM,
        ("size",),
        r"KV cache size: (?P<what>[\d,]+) tokens",
        "vLLM 0.32 v1/core/kv_cache_utils.py",
    ),
    Fact(
        "KV cache size",
        "{what} blocks",
        VLLM,
        ("blocks",),
        r"# (?:GPU|CPU|cuda|cpu) blocks: (?P<what>\d+), ",
        "vLLM 0.8 executor/executor_base.py",
    ),
    Fact(
        "concurrency",
        "{times} requests of {length} tokens",
        VLLM,
        ("concurrency",),
        r"Maximum concurrency for (?P<length>[\d,]+) tokens per request: (?P<times>[\d.]+)x",
        "vLLM 0.32 v1/core/kv_cache_utils.py",
    ),
    Fact(
        "state",
        "serving",
        (*VLLM, "sglang", "tensorrt-llm"),
        ("startup",),
        r"Application startup complete",
        "uvicorn",
    ),
)

FACTS = (*_ABOUT, *_KERNELS, *_MEMORY)

EXPECTED = (
    Expected("version", VLLM),
    Expected("quantization", VLLM),
    Expected("linear kernel", VLLM, only_with="quantization"),
    Expected("KV cache dtype", VLLM),
    Expected("attention", VLLM),
    Expected("KV cache size", VLLM),
)
