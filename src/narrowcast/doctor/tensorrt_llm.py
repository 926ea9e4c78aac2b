"""TensorRT-LLM's lines, PyTorch backend. Where nothing else is said, from the sources of 1.2 and its main branch."""

from __future__ import annotations

from narrowcast.doctor.rows import TRTLLM, Complaint, Expected, Fact

_MODELOPT = "TensorRT-LLM main quantization/modelopt_config.py"
_CONFIG = "TensorRT-LLM 1.2 _torch/model_config.py"

FACTS = (
    Fact(
        "version",
        "{what}",
        TRTLLM,
        ("version", "Version"),
        r"TensorRT[- ]LLM [vV]ersion:\s*(?P<what>\d\S*?)(?:Input.*)?$",
        "TensorRT-LLM 1.2 __init__.py",
    ),
    Fact(
        "backend",
        "{what}",
        TRTLLM,
        ("Using",),
        r"Using LLM with (?P<what>\w+) backend",
        "TensorRT-LLM 1.2 llmapi/llm.py",
    ),
    Fact(
        "quantization", "{what}", TRTLLM, ("Quantization",), r"Quantization:\s+(?P<what>\S+)", "trtllm-bench"
    ),
    Fact("dtype", "{what}", TRTLLM, ("Dtype",), r"^Dtype:\s+(?P<what>\S+)", "trtllm-bench"),
    Fact("KV cache dtype", "{what}", TRTLLM, ("Dtype",), r"KV Cache Dtype:\s+(?P<what>\S+)", "trtllm-bench"),
    Fact(
        "attention",
        "{what}",
        TRTLLM,
        ("attn_backend",),
        r"\battn_backend=['\"]?(?P<what>\w+)",
        "TensorRT-LLM 1.2 llmapi/llm_args.py",
    ),
    Fact(
        "expert kernel",
        "{algorithm} (DeepSeek-V4, stored as {layout})",
        TRTLLM,
        ("routed",),
        r"Detected DeepSeek-V4 routed MoE (?P<layout>[^%\s]\S*) checkpoint layout; using "
        r"(?P<algorithm>[^%\s]\S*) for",
        _CONFIG,
    ),
    Fact(
        "expert kernel",
        "{algorithm} (DeepSeek-V4, stored as {layout})",
        TRTLLM,
        ("routed",),
        # Some versions print the template and the values behind it.
        r"Detected DeepSeek-V4 routed MoE %s checkpoint layout.*experts\. (?P<layout>\S+) (?P<algorithm>\S+)",
        _CONFIG,
    ),
    Fact(
        "weights in memory",
        "{what} GiB",
        TRTLLM,
        ("weights",),
        r"Memory usage when loading weights: (?P<what>[\d.]+) GiB",
        "TensorRT-LLM 1.2 _torch/pyexecutor/model_loader.py",
    ),
    Fact(
        "memory for KV cache",
        "{what} GiB",
        TRTLLM,
        ("Allocated",),
        r"Allocated (?P<what>[\d.]+) GiB for max tokens in paged KV cache",
        "TensorRT-LLM 1.2 kvCacheManager.cpp",
    ),
    Fact(
        "KV cache size",
        "{what} tokens",
        TRTLLM,
        ("Allocated",),
        r"for max tokens in paged KV cache \((?P<what>\d+)\)",
        "TensorRT-LLM 1.2 kvCacheManager.cpp",
    ),
    Fact(
        "state",
        "serving",
        TRTLLM,
        ("ready",),
        r"Engine loaded and ready to serve",
        "TensorRT-LLM 0.18 pyexecutor",
    ),
)

COMPLAINTS = (
    Complaint(
        "kv-scheme-unknown",
        "warning",
        TRTLLM,
        ("kv_cache_scheme",),
        r"Unrecognized 'kv_cache_scheme' (?P<scheme>.+?); KV-cache quant disabled",
        "The file's KV cache scheme is not one that TensorRT-LLM knows: {scheme}",
        "The KV cache stays in the model's dtype: correct, with twice the memory or more.",
        'In config.json write {{"type": "float", "num_bits": 8}} or "FP8" (NVFP4 and INT8 likewise), or set '
        "kv_cache_config.dtype.",
        _MODELOPT,
    ),
    Complaint(
        "configs-diverge",
        "warning",
        TRTLLM,
        ("diverges",),
        r"Inline 'config\.json\.quantization_config' diverges from '?(?P<file>[^':]+)'?",
        "config.json and {file} say different things; TensorRT-LLM follows {file}.",
        "vLLM and SGLang may follow the other one: the same checkpoint is two models.",
        "`narrowcast audit MODEL` shows the difference, `narrowcast repair MODEL OUT` rebuilds both from "
        "the tensors.",
        _MODELOPT,
        follow=r"^\s*- (?P<detail>.+)",
    ),
    Complaint(
        "layer-config-missing",
        "info",
        TRTLLM,
        ("quant_cfg",),
        r"No quant_cfg\.json found for layer quant info",
        "A mixed-precision file without quant_cfg.json: formats of layers come from hf_quant_config.json.",
        "None, if quantized_layers is there; it is what ModelOpt writes today.",
        "Nothing.",
        _CONFIG,
    ),
    Complaint(
        "kv-configs-differ",
        "error",
        TRTLLM,
        ("kvcache",),
        r"The kvcache config in 'quant_cfg\.json', (?P<one>\S+?),\s?is different from "
        r"'hf_quant_config\.json', (?P<other>\S+?)!",
        "quant_cfg.json says {one} for the KV cache and hf_quant_config.json {other}.",
        "The model does not start.",
        "Make both say the same, or remove the entry from quant_cfg.json.",
        _CONFIG,
    ),
    Complaint(
        "targets-unmatched",
        "error",
        TRTLLM,
        ("targets",),
        r"config_groups targets matched no checkpoint module: (?P<targets>\[[^\]]*\])",
        "Targets of the config match no module: {targets}",
        "The model does not start: TensorRT-LLM knows exact names and re: patterns, no class names such as "
        "Linear.",
        "`narrowcast convert MODEL OUT --to modelopt`, which TensorRT-LLM reads natively.",
        "TensorRT-LLM main _torch/compressed_tensors.py",
    ),
    Complaint(
        "container-refused",
        "error",
        TRTLLM,
        ("Unsupported",),
        r"Unsupported quantization_config: (?P<what>.{1,80})",
        "TensorRT-LLM does not read this quantization: {what}",
        "The model does not start.",
        "`narrowcast convert MODEL OUT --to modelopt`; `narrowcast audit MODEL --for tensorrt-llm` gives "
        "the reason.",
        "TensorRT-LLM 1.2 llmapi/llm_utils.py",
    ),
    Complaint(
        "attention-falls-back",
        "info",
        TRTLLM,
        ("falling",),
        r"FlashAttention not available, falling back to default",
        "The default attention runs.",
        "Correct, perhaps slower.",
        "Nothing.",
        "TensorRT-LLM docs, logging",
    ),
)

EXPECTED = (
    Expected("version", TRTLLM),
    Expected("KV cache size", TRTLLM),
)
