"""SGLang's command line: ``sglang serve``.

    --mem-fraction-static   weights and the pool of the cache; without it SGLang works it out from the GPU and the flags
    --dtype                 "auto" makes FP16 of an FP32 config or one without a dtype, where vLLM makes BF16

Several machines run the same command, each with its own rank. Source: SGLang 0.5.23 (arg_groups/fields/,
arg_groups/kv_cache_hook.py, configs/model_config.py), read as files and not run.
"""

from __future__ import annotations

from narrowcast.hardware.cache_modes import CACHE_MODES, follows
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

_FIELDS = "SGLang 0.5.23 arg_groups/fields/"
_HOOK = "SGLang 0.5.23 arg_groups/kv_cache_hook.py"
_FP4 = ("nvfp4", "fp4_mx_block16")


def _quantization(asked: Asked) -> Given | None:
    if asked.quantization is None:
        return None
    return Given(
        asked.quantization, "the checkpoint is not quantized; SGLang makes this of it at every start"
    )


def _kv(asked: Asked) -> Given | None:
    if asked.kv is not None:
        wide = asked.kv in ("bf16", "bfloat16", "auto") and asked.served.kv is not None
        return Given(
            asked.kv,
            "16 bits, although the checkpoint asks for a quantized cache"
            if wide
            else "what the cache holds, as asked",
        )
    word = _unfollowed(asked)
    if word is None:
        return None
    return Given(
        word, "the checkpoint asks for it, and SGLang's auto follows the FP8 of ModelOpt's configs alone"
    )


def _unfollowed(asked: Asked) -> str | None:
    """SGLang's word for the cache that the checkpoint asks for and its auto would not make."""
    kv = asked.served.kv
    if asked.kv is not None or kv is None or follows("sglang", kv, asked.served.container):
        return None
    return next(iter(CACHE_MODES[kv].engines.get("sglang", ())), None)


def _attention(asked: Asked) -> Given | None:
    """Backends that read the mode, where the default one does not."""
    latent = any(kept.kind == "latent" for kept in asked.served.geometry.attention)
    kv = asked.kv or _unfollowed(asked)
    if kv == "mxfp8":
        return Given("fa4", "the only backend that reads MXFP8 keys and values")
    if kv in _FP4:
        backend = (
            "flashinfer" if latent else "trtllm_mha" if asked.question.gpu.sm in (100, 103) else "triton"
        )
        return Given(backend, f"reads {kv}; with others SGLang stops")
    return None


def _share(asked: Asked) -> Given | None:
    share = f"{asked.question.utilisation:g}"
    return Given(
        share, "weights and cache together, as the plan counts; lower it when memory runs out at the start"
    )


def _experts(asked: Asked) -> Given | None:
    reason = experts(asked)
    return None if reason is None else Given(str(asked.question.tp), reason)


def _several(text: str, reason: str) -> Row:
    def give(asked: Asked) -> Given | None:
        return Given(text or str(asked.nodes), reason) if asked.nodes > 1 else None

    name = {"": "--nnodes", "RANK": "--node-rank"}.get(text, "--dist-init-addr")
    return Row(name, give, _FIELDS + "parallel.py")


DIALECT = Dialect(
    "sglang", "0.5.23", ("sglang", "serve"), "sglang.launch_server", "--model-path",
    rows=(
        Row("--served-model-name", lambda a: value(a.name, "the name that requests use"), _FIELDS + "serving.py"),
        Row("--host", lambda a: value(a.host, "where it listens"), _FIELDS + "serving.py"),
        Row("--port", lambda a: value(a.port, "where it listens"), _FIELDS + "serving.py"),
        Row("--dtype", lambda a: Given(*a.dtype) if a.dtype else None, _FIELDS + "model.py"),
        Row("--quantization", _quantization, _FIELDS + "model.py"),
        Row("--kv-cache-dtype", _kv, _FIELDS + "model.py"),
        Row("--attention-backend", _attention, _HOOK),
        Row("--tp-size", lambda a: parallel(a, "GPUs"), _FIELDS + "parallel.py"),
        Row("--pp-size", lambda a: pipeline(a, "GPUs"), _FIELDS + "parallel.py"),
        Row("--ep-size", _experts, _FIELDS + "parallel.py"),
        _several("", "machines that share the model"),
        _several("RANK", "0 on the first machine, 1, 2, ... on the others: run the command on each"),
        _several("FIRST:20000", "the first machine and a free port of it, the same in every command"),
        Row("--context-length", context, _FIELDS + "model.py"),
        Row("--max-running-requests", sequences, _FIELDS + "schedule.py"),
        Row("--mem-fraction-static", _share, _FIELDS + "schedule.py"),
    ),
    online={"fp8_dynamic": ("fp8", 80), "mxfp8": ("mxfp8", 100)},
    port=30000,
)  # fmt: skip
