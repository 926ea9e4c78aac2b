"""From a model to what an engine would load: ``load``.

    a directory with weights, a .safetensors or .gguf file    headers; the config says the rest
    a directory with a config.json alone, or that file        the family's geometry, and the quantization_config's words
    a hub id                                                  the config, which is fetched; headers where the hub's
                                                              cache has the weights already

With a preset the linear layers of an unquantized model are taken as ``narrowcast quantize`` would write them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowcast.errors import CheckpointError, InputError, UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.jobs.opening import open_model
from narrowcast.model.families import geometry
from narrowcast.model.geometry import Geometry
from narrowcast.model.modules import Module
from narrowcast.model.roles import quantization_config
from narrowcast.numbers.formats import formats
from narrowcast.serving import headers, told
from narrowcast.serving.served import Group, Served
from narrowcast.serving.written import Writing, representatives
from narrowcast.store.checkpoint import Checkpoint, read_config
from narrowcast.store.folder import CONFIG
from narrowcast.store.gguf import is_gguf
from narrowcast.store.remote import fetch_config
from narrowcast.tensors.presets import LinearScheme, Preset, presets

CONTAINER = "compressed-tensors"  # of a preset when nobody says


def load(model: str | Path, *, preset: str | None = None, container: str | None = None) -> Served:
    """The model as it would be served. UsageError for a model or preset that there is not, CheckpointError or
    InputError for files that are none, and for what no family or container explains."""
    path = Path(model)
    if not os.path.exists(path):  # not Path.exists, which raises for names that are too long
        path = fetch_config(str(model))
    if path.suffix == ".json" and path.is_file():
        return from_config(str(model), _config(path), preset=preset, container=container, beside=path.parent)
    if path.is_dir() and not _weights(path):
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                "there is neither a config nor weights",
                where=path,
                wanted="config.json, .safetensors or .gguf",
            )
        return from_config(
            str(model), _config(path / CONFIG), preset=preset, container=container, beside=path
        )
    return _from_headers(str(model), path, preset, container)


def _config(path: Path) -> dict[str, Any]:
    return read_config(path)[1]


def _weights(path: Path) -> bool:
    return is_gguf(path) or any(file.suffix in (".safetensors", ".gguf") for file in path.iterdir())


def from_config(
    name: str,
    config: Mapping[str, Any],
    *,
    preset: str | None = None,
    container: str | None = None,
    beside: Path | None = None,
) -> Served:
    """What a config describes: its linear layers as ``preset`` would write them, or as its quantization_config says,
    with quantizers' files that lie in the folder ``beside``."""
    shape = geometry(config)
    dtype = formats[shape.dtype]
    said = told.said(config, beside)
    if said is not None:
        _refuse_preset(name, preset, said.container)
        groups, notes = said.groups(shape, dtype)
        return Served(
            name, shape, said.container, groups, shape.vectors * dtype.bits // 8, "config", None,
            *_cache(said.kv, False), (*shape.notes, *notes, *_unknown_cache(said.kv)),
        )  # fmt: skip
    groups = tuple(
        Group(matrix, None, matrix.parameters * dtype.bits // 8, dtype) for matrix in shape.matrices
    )
    plain = Served(name, shape, "plain", groups, shape.vectors * dtype.bits // 8, "config", notes=shape.notes)
    return _written(plain, preset, container, config, representatives(shape.matrices, config))


def _from_headers(name: str, path: Path, preset: str | None, container: str | None) -> Served:
    with open_model(path) as checkpoint:
        config = checkpoint.config or {}
        problem: InputError | None = None
        shape: Geometry | None = None
        try:
            shape = geometry(config)
        except CheckpointError as error:
            problem = error
        found = _read(checkpoint, shape, path)
        if not found.groups:
            raise CheckpointError(
                "there is no matrix in it", where=path, got=f"{len(checkpoint.entries)} tensors",
                wanted="the weights of a model",
            )  # fmt: skip
        notes = [*found.notes]
        if shape is None:
            shape = headers.unknown(found, config)
            notes.append(f"what this model keeps of its context is not known: {_why(problem, bool(config))}")
        else:
            notes += [*shape.notes, *headers.agree(found, shape, checkpoint.root)]
        notes += _unknown_cache(found.kv)
        kv, scales = _cache(found.kv, found.kv_scales)
        served = Served(
            name, shape, found.container, found.groups, found.vector_bytes, "headers", None, kv, scales,
            tuple(notes), found.tower_bytes,
        )  # fmt: skip
        if any(group.linear is not None for group in found.groups) or quantization_config(config):
            _refuse_preset(name, preset, found.container)
            return served
        return _written(served, preset, container, config, found.modules)


def _read(checkpoint: Checkpoint, shape: Geometry | None, path: Path) -> headers.Read:
    """The headers; of one file of a quantized model the directory says more."""
    try:
        return headers.read(checkpoint, shape)
    except CheckpointError as error:
        if path.is_file() and (path.parent / CONFIG).is_file() and not checkpoint.config:
            raise CheckpointError(
                error.problem, where=path, got=error.got, wanted=f"the {CONFIG} that explains them",
                remedy=f"give the directory, {path.parent}",
            ) from None  # fmt: skip
        raise


def _why(problem: InputError | None, config: bool) -> str:
    """Why there is no geometry."""
    if problem is None or not config:
        return f"there is no {CONFIG}"
    return f"{problem.problem} ({problem.got})" if problem.got is not None else problem.problem


def _cache(kv: str | None, scales: bool) -> tuple[str | None, bool]:
    """The cache that a checkpoint asks for, under a name of ``CACHE_MODES``."""
    return (CACHE_MODES[kv].name, scales) if kv is not None and kv in CACHE_MODES else (None, scales)


def _unknown_cache(kv: str | None) -> list[str]:
    """What is said of a cache that no engine is known to have."""
    if kv is None or kv in CACHE_MODES:
        return []
    return [
        f"the checkpoint asks for a KV cache of {kv}, which no engine here has: the model's dtype is counted"
    ]


def _written(
    served: Served,
    preset: str | None,
    container: str | None,
    config: Mapping[str, Any],
    seen: Sequence[Module],
) -> Served:
    """The model with a preset; without one as it is."""
    if preset is None:
        if container is not None:
            raise UsageError(
                "a container without a preset says nothing", got=container, remedy="--preset NAME"
            )
        return served
    chosen = presets[preset]
    writing = Writing(chosen, container or CONTAINER, config)
    groups = writing.applied(served.groups, seen)
    kv = CACHE_MODES[chosen.kv].name if chosen.kv is not None else None
    return replace(
        served, container=writing.container.name, groups=groups, preset=chosen.name, kv=kv, kv_scales=kv is not None,
        notes=(*served.notes, *writing.notes),
    )  # fmt: skip


def _refuse_preset(name: str, preset: str | None, container: str) -> None:
    if preset is not None:
        raise UsageError(
            "the model is quantized already", where=name, got=f"a checkpoint of {container}, and --preset {preset}",
            remedy="leave the preset out to plan it as it is, or give its unquantized parent",
        )  # fmt: skip


def fitting(preset: Preset, width: int) -> LinearScheme | None:
    """The preset's layer with groups that divide ``width``; None where no group does."""
    found = preset.fitting((width,))
    if found is None or (found.linear.weight.inner.tile[0] == 1 and width % (found.linear.weight.group or 1)):
        return None
    return found.linear
