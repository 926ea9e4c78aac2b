"""Lines that every engine prints: memory that ran out, CUDA's own errors, and how Python ends."""

from __future__ import annotations

import re

from narrowcast.doctor.rows import EVERY, SGLANG, VLLM, Complaint

COMPLAINTS = (
    Complaint(
        "out-of-memory",
        "error",
        EVERY,
        ("memory", "OutOfMemoryError"),
        r"CUDA out of memory|HIP out of memory|OutOfMemoryError|Failed, NVML_SUCCESS|"
        r"\[TensorRT-LLM\]\[ERROR\].*out of memory",
        "The GPU's memory ran out.",
        "The model does not start, or the server died under load.",
        "vLLM: smaller --max-model-len, --max-num-seqs or --gpu-memory-utilization (graphs live outside of "
        "it). SGLang: "
        "smaller --mem-fraction-static or --chunked-prefill-size. TensorRT-LLM: smaller "
        "free_gpu_memory_fraction, "
        "max_batch_size or max_num_tokens. `narrowcast inspect MODEL` gives the size of the weights.",
        "PyTorch",
    ),
    Complaint(
        "killed",
        "error",
        EVERY,
        ("Killed", "exitcode", "signal", "oom"),
        r"^(?:.*\s)?Killed$|exitcode: -9\b|signal (?:9|SIGKILL)\b|oom-kill",
        "The system killed a process, most often because main memory ran out while loading.",
        "The model does not start.",
        "More main memory or swap, fewer loading workers; a quantized file needs less than quantization "
        "while loading.",
        "Linux",
    ),
    Complaint(
        "no-memory-for-kv",
        "error",
        VLLM,
        ("blocks",),
        r"No available memory for the cache blocks",
        "Weights and activations leave no memory for the KV cache.",
        "The model does not start.",
        "Larger --gpu-memory-utilization, smaller --max-num-batched-tokens, a smaller format, or more GPUs.",
        "vLLM 0.32 v1/core/kv_cache_utils.py",
    ),
    Complaint(
        "kv-too-small",
        "error",
        VLLM,
        ("larger",),
        r"KV cache is needed, which is larger than the available KV cache memory|"
        r"larger than the maximum number of tokens that can be stored in KV cache",
        "One request of the full length does not fit into the KV cache.",
        "The model does not start.",
        "--max-model-len as the line suggests; --kv-cache-dtype fp8 halves the cache (with calibrated "
        "scales).",
        "vLLM 0.32 v1/core/kv_cache_utils.py",
    ),
    Complaint(
        "memory-taken",
        "error",
        VLLM,
        ("Free",),
        r"Free memory on device .* on startup is less than",
        "Something else holds the GPU's memory.",
        "The model does not start.",
        "End the other process (nvidia-smi shows it), or a smaller --gpu-memory-utilization.",
        "vLLM 0.32 v1/worker/utils.py",
    ),
    Complaint(
        "no-kernel-image",
        "error",
        EVERY,
        ("kernel",),
        r"no kernel image is available for execution on the device",
        "The build has no code for this GPU.",
        "The model does not start, or dies at the first request.",
        "A build for this compute capability; for FP8 and FP4 kernels that is often a newer version.",
        "CUDA",
    ),
    Complaint(
        "illegal-access",
        "error",
        EVERY,
        ("illegal",),
        r"an illegal memory access was encountered",
        "A kernel read or wrote outside of its memory.",
        "The server died. With quantized weights most often a shape or a group that a kernel does not check.",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel; try another --attention-backend or --linear-backend.",
        "CUDA",
    ),
    Complaint(
        "nan-logits",
        "error",
        EVERY,
        ("probability",),
        r"probability tensor contains either `?inf`?, `?nan`? or element",
        "The logits are NaN or infinite.",
        "Sampling fails or prints one token for ever.",
        "`narrowcast doctor --symptom nan` walks through the causes.",
        "PyTorch",
    ),
    Complaint(
        "started-again",
        "info",
        (*VLLM, *SGLANG),
        ("version", "ServerArgs"),
        r"vLLM (?:API )?server version \d|server_args=ServerArgs\(",
        "The log holds several starts of the engine.",
        "What is reported comes from all of them. A server that starts over and over fails each time.",
        "Pass the last start only.",
        "vLLM 0.32 entrypoints/serve/utils/api_utils.py",
        least=2,
    ),
)

# How a Python process says why it ended, at the start of a line.
EXCEPTION = re.compile(r"^(?P<name>(?:\w+\.)*\w*(?:Error|Exception))(?::\s*(?P<text>.*))?$")
# Somebody ended the engine: what it complains of afterwards is no fault.
STOPPED = re.compile(r"received signal=SIG(?:TERM|INT)|^KeyboardInterrupt\b|\bSIGTERM received")
# Errors that only pass on another one.
SECONDHAND = re.compile(
    r"Engine core initialization failed|Engine process failed to start|EngineDeadError|EngineCore "
    r"encountered|"
    r"Executor worker returned error|Worker failed with error|WorkerProc initialization failed|"
    r"initialization failed due to an exception in a background process|Scheduler hit an exception"
)
