"""vLLM's command line: ``vllm serve``.

    --gpu-memory-utilization   0.9 for years, 0.92 in 0.32 and 0.33: given, so that the plan's memory holds for all
    --linear-backend           replaced VLLM_NVFP4_GEMM_BACKEND and others; layers without such a kernel take another
    --quantization             only for what is made while loading: a quantized checkpoint announces itself

Source: vLLM 0.32 and 0.33 (engine/arg_utils.py, config/, envs.py), read as files; the CPU build of 0.32 was run. Left
out: --trust-remote-code, which runs code that came with the model; whoever trusts it adds it.
"""

from __future__ import annotations

from math import ceil

from narrowcast.hardware.kinds import weight_kind
from narrowcast.numbers.formats import E8M0
from narrowcast.serving.flags import (
    Asked,
    Dialect,
    Given,
    Row,
    context,
    experts,
    parallel,
    pipeline,
    sequences,
    value,
)

_ARGS = "vLLM 0.32 engine/arg_utils.py"
_ENTRY = "vLLM 0.32 entrypoints/launchers/cli_args.py"
_KERNELS = "vLLM 0.32 config/kernel.py"
_BLOCK = 128  # tokens of a block of the cache on CPUs
_MIB = 1 << 20
DEFAULT_UTILISATION = 0.92


def _quantization(asked: Asked) -> Given | None:
    if asked.quantization is None:
        return None
    return Given(asked.quantization, "the checkpoint is not quantized; vLLM makes this of it at every start")


def _kv(asked: Asked) -> Given | None:
    if asked.kv is None:
        return None
    if asked.kv in ("bfloat16", "float16", "auto"):
        return Given(asked.kv, "16 bits, although the checkpoint asks for a quantized cache")
    return Given(asked.kv, "what the KV cache holds, as asked")


def _experts(asked: Asked) -> Given | None:
    reason = experts(asked)
    return None if reason is None else Given("", reason)


def _utilisation(asked: Asked) -> Given | None:
    if asked.on_cpu:
        return None
    share = asked.question.utilisation
    now = (
        f"vLLM 0.32 takes {DEFAULT_UTILISATION} by itself"
        if share != DEFAULT_UTILISATION
        else "also the default"
    )
    return Given(f"{share:g}", f"the share of each GPU's memory that the plan counts with; {now}")


def _cache_bytes(asked: Asked) -> Given | None:
    """On CPUs: room for the sequences in whole blocks, and the block that vLLM keeps for itself."""
    if not asked.on_cpu:
        return None
    shape = asked.served.geometry
    tokens = (ceil(asked.context / _BLOCK) * asked.question.batch + 1) * _BLOCK
    states = sum(a.layers * a.state for a in shape.attention) * asked.question.batch * 4
    nbytes = ceil((2 * tokens * shape.kept_elements() + states) / _MIB) * _MIB
    return Given(
        str(nbytes),
        f"{tokens} tokens in 16 bits; a CPU's memory is shared, and without it vLLM asks for "
        f"{DEFAULT_UTILISATION:.0%} of all of it. It replaces VLLM_CPU_KVCACHE_SPACE, which counts whole GiB",
    )


def _backend(asked: Asked) -> Given | None:
    """INT8 from SM 100 on: the CUTLASS kernel is chosen first and raises at the first product."""
    sm = asked.question.gpu.sm
    integers = any(
        group.linear is not None
        and weight_kind(group.linear.weight) in ("int8_channel", "int8_tensor")
        and group.linear.input is not None
        for group in asked.served.groups
    )
    if not integers or sm is None or sm < 100:
        return None
    return Given(
        "triton", "for INT8 vLLM would choose CUTLASS, which has no such kernel on this GPU and fails at the first "
        "product; VLLM_DISABLED_KERNELS=CutlassInt8ScaledMMLinearKernel does the same",
    )  # fmt: skip


def _scales(asked: Asked) -> Given | None:
    """Blocks of FP8 with scales that are no powers of two, on Hopper: DeepGEMM there reads either kind."""
    blocks = [
        group.linear.weight.inner.format is not E8M0
        for group in asked.served.groups
        if group.linear is not None and weight_kind(group.linear.weight) == "fp8_block128"
    ]
    if not blocks or not all(blocks) or asked.ue8m0 or asked.question.gpu.sm != 90:
        return None
    return Given(
        "0", "vLLM would make powers of two of the checkpoint's scales and round its weights once more; Hopper does "
        "not need that",
    )  # fmt: skip


def _ray(asked: Asked) -> Given | None:
    if asked.nodes == 1:
        return None
    return Given("ray", f"{asked.world} GPUs are in {asked.nodes} machines, which vLLM reaches through Ray")


def _lines(asked: Asked) -> tuple[str, ...]:
    if asked.nodes == 1:
        return ()
    return (
        "ray start --head --port=6379    # on the first machine",
        f"ray start --address=FIRST:6379    # on every other one, of {asked.nodes} in all",
    )


DIALECT = Dialect(
    "vllm", "0.32", ("vllm", "serve"), "vllm.entrypoints.openai.api_server", "--model",
    rows=(
        Row("--served-model-name", lambda a: value(a.name, "the name that requests use"), _ARGS),
        Row("--host", lambda a: value(a.host, "where it listens"), _ENTRY),
        Row("--port", lambda a: value(a.port, "where it listens"), _ENTRY),
        Row("--dtype", lambda a: Given(*a.dtype) if a.dtype else None, _ARGS),
        Row("--quantization", _quantization, "vLLM 0.32 config/quantization.py"),
        Row("--kv-cache-dtype", _kv, "vLLM 0.32 config/cache.py"),
        Row("--tensor-parallel-size", lambda a: parallel(a, "GPUs"), _ARGS),
        Row("--pipeline-parallel-size", lambda a: pipeline(a, "GPUs"), _ARGS),
        Row("--enable-expert-parallel", _experts, _ARGS),
        Row("--distributed-executor-backend", _ray, "vLLM 0.32 config/parallel.py"),
        Row("--max-model-len", context, _ARGS),
        Row("--max-num-seqs", sequences, _ARGS),
        Row("--gpu-memory-utilization", _utilisation, "vLLM 0.32 config/cache.py"),
        Row("--kv-cache-memory-bytes", _cache_bytes, "vLLM 0.32 config/cache.py, v1/worker/cpu_worker.py"),
        Row("--linear-backend", _backend, _KERNELS),
    ),
    environment=(Row("VLLM_USE_DEEP_GEMM_E8M0", _scales, "vLLM 0.32 utils/deep_gemm.py, envs.py"),),
    online={
        "fp8_dynamic": ("fp8_per_channel", 89), "fp8_per_tensor": ("fp8_per_tensor", 75),
        "fp8_block": ("fp8_per_block", 75), "mxfp8": ("mxfp8", 80), "mxfp4": ("mxfp4", 80),
    },
    gone={
        "--calculate-kv-scales": "scales of the cache come with the checkpoint: `narrowcast calibrate-kv` makes them; "
        "a mode such as fp8_per_token_head needs none",
        "VLLM_NVFP4_GEMM_BACKEND": "--linear-backend",
        "VLLM_USE_NVFP4_CT_EMULATIONS": "--linear-backend emulation",
        "VLLM_TEST_FORCE_FP8_MARLIN": "--linear-backend marlin",
        "VLLM_MXFP4_USE_MARLIN": "--moe-backend marlin",
        "VLLM_FLASHINFER_MOE_BACKEND": "--moe-backend",
        "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-backend",
        "VLLM_USE_FLASHINFER_MOE_FP8": "--moe-backend",
        "VLLM_ATTENTION_BACKEND": "--attention-backend",
        "VLLM_USE_V1": "nothing: there is no other engine",
    },
    before=_lines,
)  # fmt: skip
