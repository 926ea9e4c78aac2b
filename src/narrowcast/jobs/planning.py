"""Before a byte is written: what will be quantized, kept and copied, and how large the result will be.

Everything that can be refused is refused here: unknown names, patterns without matches, fused siblings that
disagree, widths that no group divides, sources that are quantized already. The plan holds the exact layout of
every output shard, so its forecast is the size to the byte (the record and the model card, whose numbers are
not known yet, come on top and are counted apart).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.containers.container import Container, Document
from narrowcast.containers.detect import BESIDE
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.building import Builder
from narrowcast.jobs.calibrated import Calibration, check_model
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.describing import cache_values, describe
from narrowcast.jobs.plan import CARD, RECORD, Plan, Shard, source_identity
from narrowcast.jobs.stream import Workers
from narrowcast.model.modules import Module
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import Resolved, resolve
from narrowcast.model.roles import is_quantized_piece, quantization_config
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.config_text import REMOVE, cut_within, edit_config
from narrowcast.store.folder import some
from narrowcast.store.output import needs_index
from narrowcast.store.places import place


def make_plan(
    checkpoint: Checkpoint, model: str, out: Path, recipe: Recipe, title: str, container: Container, *,
    strict: bool = False, nonfinite: str = "refuse", workers: int | None = None,
    calibration: Calibration | None = None,
) -> Plan:  # fmt: skip
    """Settle a quantize job."""
    need_config(checkpoint, model)
    _refuse_quantized(checkpoint, checkpoint.config or {})
    check_model(calibration, checkpoint, model)
    opened = open_coded(checkpoint)
    resolved = resolve(recipe, opened.modules, others=others(checkpoint, opened.modules))
    builder = Builder(opened, container, strict=strict, calibration=calibration)
    builder.widths = tuple(a.module.out_in[1] for a in resolved.quantized)
    for assignment in resolved.assignments:
        if assignment.target is not None:
            builder.add(assignment, assignment.target)
    if calibration is not None:
        _check_used(calibration, title)
        builder.fallbacks += calibration.notes()
    if not builder.units and not builder.indivisible:
        raise UsageError(
            "nothing to quantize", where=model, got=_why_nothing(resolved), wanted="at least one linear layer"
        )
    return settle(builder, model, out, recipe, title, resolved, nonfinite=nonfinite, workers=workers)


def _check_used(calibration: Calibration, title: str) -> None:
    if not calibration.used:
        raise UsageError(
            "nothing takes a scale from the statistics", got=title, wanted="static inputs or a KV cache",
            remedy="--preset fp8, nvfp4, or any preset with +kv8; or leave out --stats",
        )  # fmt: skip


def need_config(checkpoint: Checkpoint, model: str) -> None:
    """A result is a model, and a model has a config.json."""
    if checkpoint.config_bytes is None:
        raise UsageError(
            "one file is no model to quantize: the result needs its config.json too", where=model,
            remedy=f"give its directory, {checkpoint.root}",
        )  # fmt: skip


def settle(
    builder: Builder, model: str, out: Path, recipe: Recipe, title: str, resolved: Resolved, *,
    nonfinite: str = "refuse", workers: int | None = None, saturate: bool = False, dtype: str | None = None,
    parent: str | Path | None = None, verb: str = "quantize",
) -> Plan:  # fmt: skip
    """The plan of everything that was added to a builder. ``dtype`` is what the model's config calls its dtype."""
    Workers.count_of(workers)
    builder.refuse_indivisible()
    builder.values = cache_values(builder)
    shards = builder.shards()
    checkpoint, entries = builder.checkpoint, builder.opened.entries
    document = Document(None) if builder.opened.copied else describe(builder, resolved)
    text = (
        config_text(checkpoint, document, dtype)
        if not builder.opened.copied
        else checkpoint.config_bytes or b""
    )
    beside, unmade = checkpoint.beside()
    beside |= document.beside
    index = _index(shards) if needs_index([shard.name for shard in shards]) else None
    side_files = _side_files(checkpoint, document, () if builder.opened.copied else BESIDE)
    sizes = [s.layout.size for s in shards] + [(checkpoint.root / p).stat().st_size for p, _ in side_files]
    sizes += [len(content) for content in beside.values()]
    params = {name: int(np.prod(entry.shape, dtype=np.int64)) for name, entry in entries.items()}
    taken = {unit.source.tensor for unit in builder.units if unit.step != "decode"}
    stored = sum(size for s in shards for spec in s.specs for _, size in [s.layout.offsets[spec.name]])
    total_bytes = sum(entry.nbytes for entry in entries.values())
    return Plan(
        model=model, root=checkpoint.root, source=source_identity(checkpoint), out=out, place=place(out),
        title=title, container=builder.container.name, recipe=recipe, resolved=resolved, shards=shards,
        config=text, index=index, side_files=side_files, fallbacks=tuple(builder.fallbacks),
        warnings=(*_warnings(builder, resolved), *unmade),
        coverage_params=sum(params[t] for t in taken) / max(sum(params.values()), 1),
        coverage_bytes=sum(entries[t].nbytes for t in taken) / max(total_bytes, 1),
        bits_per_weight=8 * stored / max(sum(params.values()), 1),
        source_bytes=sum(p.stat().st_size for p in checkpoint.shards),
        forecast_bytes=sum(sizes) + len(text) + (len(index_bytes(index)) if index is not None else 0),
        workers=workers, nonfinite=nonfinite, kept=_kept(builder, resolved), beside=beside,
        requantize=builder.requantize, saturate=saturate, parent=parent, verb=verb,
        calibration=builder.calibration.to_json() if builder.calibration is not None else None,
    )  # fmt: skip


def config_text(checkpoint: Checkpoint, document: Document, dtype: str | None) -> bytes:
    """config.json with the new quantization_config, or without one, and not a byte changed elsewhere."""
    assert checkpoint.config_bytes is not None
    text, config = checkpoint.config_bytes, checkpoint.config or {}
    for key, value in config.items():
        for block in ("quantization_config", "compression_config"):
            if isinstance(value, dict) and isinstance(value.get(block), dict):
                text = cut_within(text, key, block)
    if "compression_config" in config:
        text = edit_config(text, "compression_config", REMOVE)
    if dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if isinstance(config.get(key), str):
                text = edit_config(text, key, dtype)
    return edit_config(text, "quantization_config", REMOVE if document.config is None else document.config)


def _refuse_quantized(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    method = quantization_config(config)
    pieces = [name for name in checkpoint.entries if is_quantized_piece(name)]
    if method or pieces:
        got = f"quant_method {method.get('quant_method', 'unknown')}" if method else some(pieces, 3)
        if method.get("quant_method") == "gguf":
            raise InputError(
                "quantize does not take GGUF files", where=checkpoint.root, got="a GGUF file, whatever its types",
                remedy="`narrowcast convert MODEL OUT --to compressed-tensors --preset NAME` takes them, "
                "with --requantize where that rounds again",
            )  # fmt: skip
        raise InputError(
            "the model is quantized already", where=checkpoint.root, got=got,
            wanted="a BF16, FP16 or FP32 model",
            remedy="start from its unquantized parent, since a second rounding adds loss; "
            "`narrowcast convert` takes it, with --preset NAME, and with --requantize where that rounds again",
        )  # fmt: skip


def others(checkpoint: Checkpoint, found: Sequence[Module]) -> list[str]:
    matrices = {module.tensor for module in found}
    return [name.rsplit(".", 1)[0] for name in checkpoint.entries if name not in matrices]


def _why_nothing(resolved: Resolved) -> str:
    reasons: dict[str, int] = {}
    for assignment in resolved.kept:
        reasons[assignment.why] = reasons.get(assignment.why, 0) + 1
    return "; ".join(f"{count} × {why}" for why, count in reasons.items()) or "no matrices in the checkpoint"


def _kept(builder: Builder, resolved: Resolved) -> dict[str, tuple[int, int]]:
    """Why tensors stay as they are: reason to (tensors, bytes)."""
    taken = {unit.source.tensor for unit in builder.units}
    reasons = {a.module.tensor: a.why for a in resolved.kept}
    kept: dict[str, tuple[int, int]] = {}
    for name, entry in builder.opened.entries.items():
        if name not in taken:
            why = reasons.get(name, "not a matrix")
            count, size = kept.get(why, (0, 0))
            kept[why] = (count + 1, size + entry.nbytes)
    return kept


def _warnings(builder: Builder, resolved: Resolved) -> list[str]:
    checkpoint = builder.checkpoint
    found = [
        f"{path} holds weights in another format; it is not copied" for path in checkpoint.foreign_weights
    ]
    if any(str(name) == RECORD for name in checkpoint.side_files):
        found.append(f"{RECORD} of the source is not copied: this run writes its own")
    taken = {unit.source.tensor for unit in builder.units}
    known = {a.module.name: a.module.tensor for a in resolved.assignments}
    unknown = [name for name in resolved.unknown if known[name] in taken]
    if unknown:
        found.append(f"{len(unknown)} quantized layers have names that no rule knows, such as {unknown[0]}")
    return [*found, *builder.opened.contents.notes]


def _side_files(
    checkpoint: Checkpoint, document: Document, replaced: Sequence[str]
) -> tuple[tuple[Path, Path], ...]:
    """What travels along, with its name in the result, where the record and the card are this run's and files about a
    quantization are replaced."""
    names = {str(name) for name in checkpoint.side_files}
    card = "README.source.md"
    while card in names:
        card = card.replace(".md", ".source.md")
    return tuple(
        (name, Path(card) if str(name) == CARD else name)
        for name in checkpoint.side_files
        if str(name) not in (RECORD, *replaced, *document.beside)
    )


def _index(shards: Sequence[Shard]) -> dict[str, Any]:
    sizes = [size for shard in shards for _, size in shard.layout.offsets.values()]
    names = {spec.name: shard.name for shard in shards for spec in shard.specs}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(names.items()))}


def index_bytes(index: dict[str, Any]) -> bytes:
    return (json.dumps(index, indent=2) + "\n").encode()
