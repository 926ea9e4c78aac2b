"""Containers: how engines spell quantized checkpoints. One row each; a new container is one file and one line here.

``detect`` decides by config and data together which container a checkpoint is in, and refuses contradictions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module

from narrowcast.containers.container import Container
from narrowcast.errors import UsageError

# Name to module; imported when it is asked for.
_MODULES: Mapping[str, str] = {
    "plain": "plain",
    "compressed-tensors": "compressed_tensors",
    "modelopt": "modelopt",
    "quark": "quark",
    "gptq": "gptq",
    "awq": "awq",
    "auto-round": "auto_round",
    "fp8": "native_fp8",
    "fbgemm-fp8": "fbgemm",
    "mxfp4": "gpt_oss",
    "gguf": "gguf",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
}


class Containers(Mapping[str, Container]):
    """The containers by name; unknown names are refused with the nearest ones."""

    def __getitem__(self, name: str) -> Container:
        key = name.lower().replace("_", "-")
        if key not in _MODULES:
            near = difflib.get_close_matches(key, _MODULES, 2)
            raise UsageError(
                "unknown container", got=name, wanted=", ".join(_MODULES),
                remedy=(f"did you mean {', '.join(near)}? " if near else "")
                + "`narrowcast convert --help` lists those that are written",
            )  # fmt: skip
        found: Container = import_module(f"narrowcast.containers.{_MODULES[key]}").CONTAINER
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


containers = Containers()
