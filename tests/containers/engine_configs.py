"""Run by .venv-engine: vLLM's own parsers on quantization blocks, and which modules they would leave alone.

    python engine_configs.py < [{"config": block, "kept": [names], "quantized": [names]}, ...]

One line of JSON for each: the class that took it, for each name whether it is left alone, and for Quark whether vLLM
has a scheme for it. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def parsed(block: dict[str, Any]) -> Any:
    """The config object, by the same overrides that an engine goes through."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    method = block.get("quant_method", "modelopt")
    names = ["modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"] if method == "modelopt" else []
    for name in names:
        found = get_quantization_config(name).override_quantization_method(
            block | {"quant_method": method}, None
        )
        if found is not None:
            return get_quantization_config(found).from_config(block)
    return get_quantization_config(method).from_config(block)


def left_alone(config: Any, name: str) -> bool:
    """Whether no method of the config takes the module."""
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    if hasattr(config, "is_layer_excluded"):
        mixed = hasattr(config, "quantized_layers")
        return bool(config.is_layer_excluded(name) or (mixed and config._resolve_quant_algo(name) is None))
    return bool(should_ignore_layer(name, ignore=config.quant_config["exclude"], fused_mapping={}))


def has_scheme(config: Any, name: str) -> bool:
    """Whether Quark's config leads to one of vLLM's schemes."""
    from vllm.model_executor.layers.linear import LinearBase

    try:
        return config.get_scheme_cls(LinearBase, name) is not None
    except (NotImplementedError, ValueError):
        return False


def main() -> None:
    for case in json.load(sys.stdin):
        config = parsed(case["config"])
        alone = {name: left_alone(config, name) for name in case["kept"] + case["quantized"]}
        answer = {"class": type(config).__name__, "alone": alone}
        if hasattr(config, "get_scheme_cls"):
            answer["runs"] = {name: has_scheme(config, name) for name in case["quantized"]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
