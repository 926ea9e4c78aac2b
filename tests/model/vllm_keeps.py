"""Run by .venv-engine: what vLLM's layers of the models in vllm_keeps.json ask of its cache, as JSON.

Each model is built on the meta device, without memory for its weights, and every layer is asked for its spec. Rows with
a "calculator" are of classes that the CPU build cannot import; for those the state's shape is asked of the calculator
that the class would ask. dtypes of states are left out: the CPU build keeps recurrences in fp32, GPUs as
MambaStateDtypeCalculator says.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")


def layer(spec: Any) -> tuple[Any, ...]:
    """What one layer keeps: kind, key heads, width of K and of V, tokens at most; or the shapes of its states."""
    if hasattr(spec, "shapes"):
        return ("state", *spec.shapes)
    kinds = {
        "FullAttentionSpec": "full",
        "SlidingWindowSpec": "sliding",
        "ChunkedLocalAttentionSpec": "chunked",
        "MLAAttentionSpec": "latent",
    }
    kind = kinds[type(spec).__name__]
    window = getattr(spec, {"chunked": "attention_chunk_size"}.get(kind, "sliding_window"), None)
    return (kind, spec.num_kv_heads, spec.head_size, spec.head_size_v, window)


def keeps(config: dict[str, Any], architecture: str) -> list[Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        engine = EngineArgs(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=256,
            enforce_eager=True, dtype="bfloat16",
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(engine):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
            destroy_model_parallel()
            initialize_model_parallel(1)
            with torch.device("meta"):
                initialize_model(engine)
    layers = engine.compilation_config.static_forward_context.values()
    found = Counter(
        layer(each.get_kv_cache_spec(engine)) for each in layers if isinstance(each, AttentionLayerBase)
    )
    return sorted([count, *spec] for spec, count in found.items())


def calculated(name: str, arguments: dict[str, int]) -> list[Any]:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    return list(getattr(MambaStateShapeCalculator, name)(tp_world_size=1, **arguments))


if __name__ == "__main__":
    rows = json.load(sys.stdin)
    for row in rows:
        if "calculator" in row:
            row["shapes"] = calculated(row["calculator"], row["arguments"])
        else:
            row["keeps"] = keeps(row["config"], row["architecture"])
    print(json.dumps(rows))
