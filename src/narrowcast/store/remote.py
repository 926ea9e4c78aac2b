"""A model by its hub id: fetched into the hub's own cache by huggingface_hub, then read like any directory.

Weights in other formats are not fetched. What is left out: revisions, tokens and mirrors, for which the hub's
own command line and environment variables are the right place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from narrowcast.errors import UsageError

# ./model and model/file.safetensors are paths.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)$")
_UNNEEDED = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx*",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "consolidated*",
    "original/*",
]


# What says how a model is built and stored, without a weight.
_CONFIGS = ["config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"]


def fetch(model: str) -> Path:
    """The local directory of a hub model; UsageError when MODEL is no hub id or cannot be fetched."""
    return _snapshot(model, ignore_patterns=_UNNEEDED)


def fetch_config(model: str) -> Path:
    """The local directory of a hub model's config and the quantizers' files beside it, with weights only where they
    are in the hub's cache already. UsageError as ``fetch``."""
    return _snapshot(model, allow_patterns=_CONFIGS)


def _snapshot(model: str, **which: Any) -> Path:
    if not _HUB_ID.match(model):
        raise UsageError(
            "no such model", where=model, wanted="a directory, a .safetensors or .gguf file, or a hub id"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            "no such directory, and hub ids need the package huggingface_hub",
            where=model,
            remedy="pip install 'narrowcast[hub]', or download the model and give its directory",
        ) from None
    try:
        return Path(snapshot_download(model, **which))
    except Exception as error:  # the hub's errors come from three packages and change between its versions
        raise UsageError(
            "no such directory, and the hub did not give this model",
            where=model,
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            remedy="check the name, the network and the access rights, or give a local directory",
        ) from error
