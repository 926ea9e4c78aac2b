"""Open any model that a job can take: a directory, a safetensors file, a GGUF file, or a hub id."""

from __future__ import annotations

from pathlib import Path

from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.gguf import is_gguf


def open_model(model: str | Path) -> Checkpoint:
    """The model as a checkpoint. Raises what ``Checkpoint.open`` and ``open_gguf`` raise."""
    if is_gguf(model):
        from narrowcast.model.gguf_checkpoint import open_gguf

        return open_gguf(model)
    return Checkpoint.open(model)
