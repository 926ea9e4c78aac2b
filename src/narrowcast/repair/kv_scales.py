"""Calibrated scales of the KV cache in a checkpoint that is there: in its container's own spelling, and no other byte.

    <attention> + the container's suffix     float32, new, or in the place of a scale that was there
    config                                   the key about the KV cache; other keys stay as they are

The scales lie in the shard of the keys' projection, which is written anew with its other tensors as they were; other
shards are copied byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowcast.audit.opening import open_anyway
from narrowcast.audit.run import audit
from narrowcast.containers import containers
from narrowcast.containers.container import Document
from narrowcast.containers.spelling import Array
from narrowcast.errors import UsageError
from narrowcast.jobs.cache_scales import SIDES, CacheScales
from narrowcast.jobs.calibrated import attentions, check_cache
from narrowcast.jobs.coded import Opened
from narrowcast.jobs.fingerprint import fingerprint, kinship
from narrowcast.jobs.planning import config_text
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.model.roles import quantization_config
from narrowcast.repair.configs import document_of
from narrowcast.repair.draft import Draft, Mended, New
from narrowcast.repair.run import Repaired, write_draft
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.places import check_absent, check_place, place
from narrowcast.store.writer import Spec


def write_kv_scales(
    model: str | Path,
    out: str | Path,
    scales: CacheScales,
    *,
    resume: bool = False,
    progress: ProgressFactory = Silent,
) -> Repaired:
    """A copy of ``model`` in ``out`` whose KV cache has these scales; see the module docstring.

    Raises UsageError where the scales are of another model, where the container has no such cache (an unquantized
    checkpoint has none), and where the checkpoint is broken, which is repaired first.
    """
    target = place(out)
    check_place(target, Path(model))
    check_absent(target)
    found = open_anyway(model)
    draft = Draft(found, found.checkpoint.config_bytes)
    with found.checkpoint:
        opened = found.opened
        if opened is None or found.layer_refusals or found.file_refusals:
            raise UsageError(
                "the checkpoint is broken", where=model, remedy=f"`narrowcast repair {model} OUT` first"
            )
        _check_container(opened, scales.kv, model)
        scales.check_model(fingerprint(found.checkpoint), kinship(opened), model)
        draft.mended.append(_add(draft, opened, scales))
        _say(draft, opened, scales.kv)
        write_draft(draft, target, resume, progress)
    left = tuple(audit(target, quick=True).open_findings)
    foreign = tuple(map(str, found.checkpoint.foreign_weights))
    return Repaired(str(model), Path(out), tuple(draft.mended), (), left, False, foreign)


def check_target(model: str | Path, out: str | Path, kv: str, overlay: bool) -> None:
    """Before anything runs: whether OUT can be made. Raises UsageError as the writing would."""
    check_place(place(out), Path(model))
    check_absent(place(out))
    if overlay:
        return
    found = open_anyway(model)
    with found.checkpoint:
        if found.opened is not None:
            _check_container(found.opened, kv, model)


def _check_container(opened: Opened, kv: str, model: object) -> None:
    container = containers[opened.contents.container]
    if container.cache is None:
        raise UsageError(
            f"{container.title} has no scales of a KV cache", where=model,
            remedy="--overlay writes them to a file of their own; `narrowcast quantize --preset fp8_dynamic+kv8 "
            "--stats FILE` writes a checkpoint that has them",
        )  # fmt: skip
    check_cache(container, kv)


def _add(draft: Draft, opened: Opened, scales: CacheScales) -> Mended:
    """The tensors; one that was there keeps its shard, under the name that the container gives it."""
    cache = containers[opened.contents.container].cache
    assert cache is not None
    keys = attentions(opened.modules, draft.checkpoint.root)
    old = {(one.attention, one.which): one.tensor for one in opened.contents.cache_scales}
    twice = [name for name in set(old.values()) if list(old.values()).count(name) > 1]
    if twice:
        raise UsageError(
            "one scale stands for keys and values both", where=twice[0],
            remedy=f"`narrowcast repair {draft.checkpoint.root} OUT --only kv_names` gives each its own",
        )  # fmt: skip
    names = []
    for path, tensors in scales.tensors(cache, keys).items():
        shard = opened.entries[keys[path].tensor].path
        for which, (name, array) in zip(SIDES, tensors.items(), strict=True):
            there = old.get((path, which))
            if there is not None:
                shard = draft.checkpoint.entries[there].path
                draft.names |= {} if there == name else {there: name}
            spec = Spec(there or name, DTYPES[cache.dtype], array.shape)
            draft.tensors[there or name] = New(spec, shard, _given(array))
            names.append(name)
    said = (
        f"{len(names)} scales of the KV cache ({scales.kv}, {scales.stat} / 448, sha256 {scales.sha256[:12]})"
    )
    return Mended("kv_scales", said, tuple(names))


def _given(array: Array) -> Any:
    return lambda: array


def _say(draft: Draft, opened: Opened, kv: str) -> None:
    """The configs ask for the cache: what they would say otherwise with it, and nothing else, is changed."""
    without, document = (
        document_of(replace(opened, contents=replace(opened.contents, kv=scheme))) for scheme in (None, kv)
    )
    changed = {
        key: value
        for key, value in (document.config or {}).items()
        if (without.config or {}).get(key) != value
    }
    old = quantization_config(draft.checkpoint.config or {})
    if changed and old:
        draft.config = config_text(draft.checkpoint, Document(old | changed), None)
    for name, content in document.beside.items():
        if name in {str(one) for one in draft.checkpoint.side_files}:
            draft.beside[name] = _beside(draft.checkpoint.root / name, content)


def _beside(path: Path, made: bytes) -> bytes:
    """A side file that says it too, as ModelOpt's does."""
    there: Mapping[str, Any] = json.loads(path.read_bytes())
    said, wanted = there.get("quantization"), json.loads(made)["quantization"]
    key = "kv_cache_quant_algo"
    if not isinstance(said, dict) or key not in wanted:
        return made
    return (json.dumps({**there, "quantization": {**said, key: wanted[key]}}, indent=4) + "\n").encode()
