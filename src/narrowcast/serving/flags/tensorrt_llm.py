"""TensorRT-LLM's command line: ``trtllm-serve``, and the YAML file that it reads beside it.

    --extra_llm_api_options FILE    the cache's dtype and share; what is in the file wins over flags

The share of memory is one of what is left once the weights are there, not of the whole GPU. A cache's settings replace
each other as a whole, so that both stand in the file when one does. Source: TensorRT-LLM 1.2 (commands/serve.py,
docs/source/commands/trtllm-serve), read as files and not run; ``--config`` is a newer name of the same flag.
"""

from __future__ import annotations

from collections.abc import Mapping

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

_SERVE = "TensorRT-LLM 1.2 commands/serve.py"
OPTIONS = "trtllm-options.yaml"


def _share(asked: Asked) -> str | None:
    """The share of what weights leave free that is the plan's share of all: (u·M - W) / (M - W)."""
    memory = asked.question.gpu.usable
    if memory is None:
        return None
    weights = asked.served.nbytes / asked.world
    left = memory - weights
    wanted = asked.question.utilisation * memory - weights
    return f"{wanted / left:.2f}" if left > 0 and wanted > 0.01 * left else None


def _fraction(asked: Asked) -> Given | None:
    share = _share(asked)
    if share is None or asked.kv is not None:
        return None
    whole = f"{asked.question.utilisation:g}"
    return Given(share, f"of what the weights leave free, which makes {whole} of the GPU's memory as planned")


def _options(asked: Asked) -> Given | None:
    held = [f"the KV cache holds {asked.kv}"] if asked.kv is not None else []
    held += [asked.dtype[1]] if asked.dtype is not None else []
    return Given(OPTIONS, f"{'; '.join(held)}: set in this file") if held else None


def _file(asked: Asked) -> Mapping[str, str]:
    lines = [] if asked.dtype is None else [f"dtype: {asked.dtype[0]}"]
    if asked.kv is not None:
        share = _share(asked)
        lines += ["kv_cache_config:", f"  dtype: {asked.kv}"]
        lines += [] if share is None else [f"  free_gpu_memory_fraction: {share}"]
    return {OPTIONS: "\n".join(lines) + "\n"} if lines else {}


def _experts(asked: Asked) -> Given | None:
    reason = experts(asked)
    return None if reason is None else Given(str(asked.question.tp), reason)


def _per_node(asked: Asked) -> Given | None:
    return Given(str(asked.gpus_per_node), "how many GPUs a machine has") if asked.nodes > 1 else None


def _lines(asked: Asked) -> tuple[str, ...]:
    if asked.nodes == 1:
        return ()
    return (
        f"# as one job of {asked.world} tasks, {asked.gpus_per_node} on a machine, with the command behind",
        f"srun -N {asked.nodes} -n {asked.world} --ntasks-per-node {asked.gpus_per_node} --mpi pmix "
        "trtllm-llmapi-launch",
    )


DIALECT = Dialect(
    "tensorrt-llm", "1.2", ("trtllm-serve",), "tensorrt_llm.commands.serve", "",
    rows=(
        Row("--host", lambda a: value(a.host, "where it listens"), _SERVE),
        Row("--port", lambda a: value(a.port, "where it listens"), _SERVE),
        Row("--tp_size", lambda a: parallel(a, "GPUs"), _SERVE),
        Row("--pp_size", lambda a: pipeline(a, "GPUs"), _SERVE),
        Row("--ep_size", _experts, _SERVE),
        Row("--gpus_per_node", _per_node, _SERVE),
        Row("--max_seq_len", context, _SERVE),
        Row("--max_batch_size", sequences, _SERVE),
        Row("--kv_cache_free_gpu_memory_fraction", _fraction, _SERVE),
        Row("--extra_llm_api_options", _options, _SERVE),
    ),
    files=_file,
    before=_lines,
)  # fmt: skip
