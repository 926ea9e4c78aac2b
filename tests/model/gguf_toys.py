"""Toy models of every family with what llama.cpp's converter makes of them (see containers/gguf_upstream/make.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.containers.gguf_blocks import quantize
from narrowcast.model.gguf_config import gguf_of_config
from narrowcast.model.gguf_model import placed, specs, tensor_type
from narrowcast.model.gguf_names import family_of_config, moves_to_gguf
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import BF16
from narrowcast.store.gguf import GGML_TYPES
from narrowcast.store.gguf_writer import GGUFSpec, gguf_writer
from narrowcast.store.safetensors import Reader

UPSTREAM = Path(__file__).parents[1] / "containers/gguf_upstream"
FAMILIES = sorted(path.name for path in UPSTREAM.iterdir() if path.is_dir() and path.name[0] != "_")


def config(family: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((UPSTREAM / family / "config.json").read_text())
    return loaded


def tensors(family: str) -> dict[str, np.ndarray[Any, Any]]:
    """The toy's tensors as float32 (exact: they are bf16)."""
    with Reader(UPSTREAM / family / "model.safetensors") as reader:
        return {name: widen(np.array(reader.array(name)), BF16) for name in reader.entries}


def write(
    path: Path,
    settings: Mapping[str, Any],
    state: Mapping[str, np.ndarray[Any, Any]],
    kind: str,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF file of a model in memory, whose matrices are quantized to ``kind``."""
    family = family_of_config(settings)
    head = gguf_of_config(family, settings, "toy", kind)
    tied = bool(settings.get("tie_word_embeddings", family.model_type.startswith("gemma")))
    moves = moves_to_gguf(family, state, head.fields, tied)
    shapes = {name: value.shape for name, value in state.items()}
    wanted = specs(moves, shapes, lambda name, shape, _: tensor_type(name, shape, kind))
    beside = [GGUFSpec(name, GGML_TYPES["F32"], value.shape) for name, value in head.tensors.items()]
    kinds = {spec.name: spec.type for spec in wanted}
    with gguf_writer(path, [*beside, *wanted], head.fields | dict(more or {})) as writer:
        for name, value in head.tensors.items():
            writer.write(name, value)
        for move in moves:
            value = state[move.name]
            matrix = (value + np.float32(move.shift)).reshape(-1, 1 if value.ndim == 1 else value.shape[-1])
            stored = quantize(kinds[move.gguf], matrix)
            writer.write(*placed(move, kinds[move.gguf], value.shape, 0, stored))
        writer.finish()
    return path
