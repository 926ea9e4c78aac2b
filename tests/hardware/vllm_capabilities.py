"""What vLLM's classes answer when they are asked, as JSON; run by the Python of .venv-engine.

{"schemes": {class: capability}, "methods": {name: capability}}
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


def schemes(package: str) -> dict[str, int]:
    """get_min_capability of every scheme class of a package that is not abstract."""
    module = importlib.import_module(package)
    found = {}
    for info in pkgutil.iter_modules(module.__path__):
        for name, cls in vars(importlib.import_module(f"{package}.{info.name}")).items():
            if (
                inspect.isclass(cls)
                and cls.__module__ == f"{package}.{info.name}"
                and hasattr(cls, "get_min_capability")
            ):
                try:
                    capability = cls.get_min_capability()
                except NotImplementedError:
                    continue
                if capability is not None:
                    found[name] = capability
    return found


def methods() -> dict[str, int]:
    """get_min_capability of the configuration class of every method."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    return {name: get_quantization_config(name).get_min_capability() for name in QUANTIZATION_METHODS}


if __name__ == "__main__":
    layers = "vllm.model_executor.layers.quantization"
    answer = {
        "schemes": schemes(f"{layers}.compressed_tensors.schemes") | schemes(f"{layers}.quark.schemes"),
        "methods": methods(),
    }
    print(json.dumps(answer))
