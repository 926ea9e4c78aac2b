"""SGLang's lines. Where nothing else is said, from the sources of 0.5.23."""

from __future__ import annotations

from narrowcast.doctor.rows import SGLANG, VLLM, Complaint, Expected, Fact

_ARGS = r"server_args=ServerArgs\(.*?"
_SET = r"'(?!auto')(?P<what>[\w-]+)'"  # None and auto are what was asked for, not what runs
_SOURCE = "SGLang 0.5.23 "


def _argument(kind: str, name: str, value: str) -> Fact:
    return Fact(
        kind, "{what}", SGLANG, ("ServerArgs",), _ARGS + rf"\b{name}={value}", _SOURCE + "server_args.py"
    )


FACTS = (
    _argument("model", "model_path", r"'(?P<what>[^']+)'"),
    _argument("dtype", "dtype", _SET),
    _argument("quantization", "quantization", _SET),
    _argument("KV cache dtype", "kv_cache_dtype", r"'(?P<what>\w+)'"),
    _argument("attention", "attention_backend", r"'(?P<what>\w+)'"),
    _argument("expert kernel", "moe_runner_backend", _SET),
    _argument("linear kernel", "fp8_gemm_runner_backend", _SET),
    _argument("tensor parallel", "tp_size", r"(?P<what>\d+)"),
    Fact(
        "version",
        "{what}",
        SGLANG,
        ("sglang", "SGLang"),
        r"\b(?:sglang|SGLang)(?: version)?[ :=]+v?(?P<what>\d+\.\d+\.\d\S*)",
        _SOURCE + "launch_server.py",
    ),
    Fact(
        "attention",
        "{what}",
        SGLANG,
        ("Attention",),
        r"Attention backend not (?:specified|set|explicitly specified)\. Use (?P<what>\S+) backend by "
        r"default",
        _SOURCE + "server_args.py",
    ),
    Fact(
        "architecture",
        "{what}",
        SGLANG,
        ("Load",),
        r"Load weight end\..*?\btype=(?P<what>\w+)",
        _SOURCE + "model_executor/model_runner.py",
    ),
    Fact(
        "dtype",
        "{what}",
        SGLANG,
        ("Load",),
        r"Load weight end\..*?\bdtype=torch\.(?P<what>\w+)",
        "SGLang 0.5.10 model_executor/model_runner.py",
    ),
    Fact(
        "quantization",
        "{what}",
        SGLANG,
        ("Load",),
        r"Load weight end\..*?\bquant=(?P<what>[\w-]+)",
        _SOURCE + "model_executor/model_runner.py",
    ),
    Fact(
        "weights in memory",
        "{what} GB",
        SGLANG,
        ("Load",),
        r"Load weight end\..*?\bmem usage=(?P<what>[\d.]+) GB",
        _SOURCE + "model_executor/model_runner.py",
    ),
    Fact(
        "quantization",
        "fp8",
        SGLANG,
        ("fp8",),
        r"Detected fp8 checkpoint\.$",
        _SOURCE + "layers/quantization/fp8.py",
    ),
    Fact(
        "KV cache size",
        "{what} tokens",
        SGLANG,
        ("Cache",),
        r"KV Cache is allocated\..*?#tokens: (?P<what>\d+)",
        _SOURCE + "mem_cache/memory_pool.py",
    ),
    Fact(
        "KV cache size",
        "{what} tokens",
        SGLANG,
        ("max_total_num_tokens",),
        r"max_total_num_tokens=(?P<what>\d+)",
        _SOURCE + "managers/scheduler.py",
    ),
    Fact(
        "KV scales",
        "from {what}",
        SGLANG,
        ("Loaded",),
        r"Loaded KV cache scaling factors from (?P<what>\S+)",
        _SOURCE + "model_executor/model_runner.py",
    ),
    Fact(
        "state",
        "serving",
        SGLANG,
        ("fired",),
        r"The server is fired up and ready to roll",
        _SOURCE + "entrypoints/http_server.py",
    ),
)

COMPLAINTS = (
    Complaint(
        "kv-scale-missing",
        "warning",
        SGLANG,
        ("scaling",),
        r"Using FP8 KV cache but no scaling factors provided",
        "The FP8 KV cache runs on the scale 1.0: no file of scales was given.",
        "Keys and values beyond 448 are clipped and small ones lose bits; long prompts and reasoning suffer "
        "first. "
        "Scales in the checkpoint (k_scale, v_scale) are another matter; the engine prints this for such "
        "files too.",
        "`narrowcast audit MODEL --for sglang` tells whether the file has scales that SGLang reads; "
        "--quantization-param-path gives a file of them; --kv-cache-dtype bf16 does without.",
        _SOURCE + "model_executor/model_runner.py",
    ),
    Complaint(
        "kv-4-bit",
        "warning",
        SGLANG,
        ("Cache",),
        r"\b(?P<dtype>\w+) KV Cache might lead to an accuracy drop",
        "The KV cache is {dtype}.",
        "4 bits per value: expect a measurable loss, more with long prompts.",
        "Measure on your task, or --kv-cache-dtype fp8_e4m3 with scales.",
        _SOURCE + "mem_cache/kv_cache_dtype.py",
    ),
    Complaint(
        "ue8m0-rounding",
        "warning",
        SGLANG,
        ("scale_fmt",),
        r"DeepGemm is enabled but the scale_fmt of checkpoint is not ue8m0",
        "DeepGEMM wants power-of-two scales and the checkpoint has others.",
        "FP8 block weights are quantized again when they are loaded: a second rounding. Layers of other "
        "formats are "
        "not touched.",
        "--fp8-gemm-backend triton or SGLANG_ENABLE_JIT_DEEPGEMM=0 keeps the file's scales; or make the "
        "file with "
        "`--preset fp8_block_ue8m0`.",
        _SOURCE + "configs/model_config.py",
    ),
    Complaint(
        "gemm-falls-back",
        "warning",
        SGLANG,
        ("cannot",),
        r"--fp8-gemm-backend=(?P<backend>\S+) cannot serve (?P<what>.+?)(?:[;,.].*)? using Triton",
        "{backend} cannot compute {what}; Triton does.",
        "Correct, slower, and another rounding than the backend that was asked for.",
        "Drop --fp8-gemm-backend, or use shapes that it supports.",
        _SOURCE + "layers/quantization/fp8_utils.py",
    ),
    Complaint(
        "expert-falls-back",
        "warning",
        SGLANG,
        ("Fp8MoEMethod",),
        r"Fp8MoEMethod has no (?P<backend>\S+) path; using triton",
        "Experts have no {backend} path; Triton runs them.",
        "Correct; slower than the backend that was asked for.",
        "--moe-runner-backend auto, or a backend that has FP8 experts.",
        _SOURCE + "layers/quantization/fp8.py",
    ),
    Complaint(
        "mxfp8-block",
        "info",
        SGLANG,
        ("overriding",),
        r"MXFP8 overriding weight_block_size=(?P<said>\[?[^\]]*\]?) from config\.json",
        "The config says blocks of {said}; MXFP8 means [1, 32], which is what is read.",
        "None where the scales in the file are per 32; else the file is not MXFP8.",
        "`narrowcast audit MODEL` checks the scales' shape; `narrowcast repair MODEL OUT` corrects the "
        "config.",
        _SOURCE + "layers/quantization/fp8.py",
    ),
    Complaint(
        "slow-method",
        "warning",
        (*VLLM, *SGLANG),
        ("explicitly",),
        r"Detected that the model can run with (?P<fast>\S+), however you specified "
        r"quantization=(?P<slow>\S+) explicitly",
        "{slow} was asked for where {fast} could run.",
        "Correct, but far slower.",
        "Drop --quantization.",
        _SOURCE + "layers/quantization/awq.py",
    ),
    Complaint(
        "weights-uninitialized",
        "error",
        SGLANG,
        ("initialized",),
        r"Some weights are not initialized from checkpoints: (?P<names>.{1,80})",
        "The checkpoint lacks tensors that the model needs, such as {names}",
        "They hold whatever was in memory: noise, perhaps fluent.",
        "`narrowcast audit MODEL --against PARENT --for sglang`.",
        _SOURCE + "models/deepseek_v4.py",
    ),
    Complaint(
        "too-little-memory",
        "error",
        SGLANG,
        ("enough",),
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "Weights leave no memory for the KV cache.",
        "The model does not start.",
        "Larger --mem-fraction-static, smaller --context-length, a smaller format or more GPUs (--tp).",
        _SOURCE + "mem_cache/memory_pool.py",
    ),
    Complaint(
        "gemm-not-available",
        "error",
        SGLANG,
        ("requested",),
        r"(?<!\S)(?P<backend>\S+) (?:backend|dense GEMM) requested via (?P<flag>--\S+?)(?:=\S+)?,? but",
        "{flag} asks for a backend that is not there.",
        "The model does not start.",
        "Drop {flag}, or install what the line names.",
        _SOURCE + "layers/quantization/fp8_utils.py",
    ),
    Complaint(
        "kv-mode-refused",
        "error",
        SGLANG,
        ("kv",),
        r"--kv-cache-dtype[ =](?P<mode>\w+) (?:requires|is not supported on|is reserved for)",
        "SGLang has no KV cache in {mode} on this machine.",
        "The model does not start.",
        "--kv-cache-dtype fp8_e4m3 or bfloat16; fp4_mx_block16 with --attention-backend triton.",
        _SOURCE + "arg_groups/kv_cache_hook.py",
    ),
    Complaint(
        "backend-not-here",
        "error",
        SGLANG,
        ("deprecated",),
        r"(?P<flag>--[\w-]+)=(?P<backend>\w+) is deprecated on this hardware",
        "{flag} {backend} is not for this GPU.",
        "The model does not start.",
        "Drop {flag}: SGLang chooses by itself.",
        _SOURCE + "layers/quantization/fp8_utils.py",
    ),
)

EXPECTED = (
    Expected("quantization", SGLANG),
    Expected("linear kernel", SGLANG, only_with="quantization"),
    Expected("KV cache dtype", SGLANG),
    Expected("attention", SGLANG),
    Expected("KV cache size", SGLANG),
)
