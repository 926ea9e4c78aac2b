"""Convert a checkpoint from any container to any other, on a CPU, streaming, and without loss where that can be.

    no preset      every quantized matrix keeps its scheme: codes and block scales move bit for bit
    a preset       what it names is moved into that scheme without rounding where values allow it, or rounded
    when asked
    plain          exact decode, one rounding to bf16, fp16 or fp32; no quantization_config is left

What travels: every tensor that is not quantized byte for byte, a static input scale with its matrix, the scales
of a KV cache under the
new container's names. The same container without a preset is a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from narrowcast.containers import containers
from narrowcast.containers.container import Container
from narrowcast.containers.gguf import NAME as GGUF
from narrowcast.containers.plain import NAME as PLAIN
from narrowcast.errors import UsageError
from narrowcast.jobs.building import SOURCES, Builder
from narrowcast.jobs.coded import Logical, Opened, as_it_is, open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.parent import check_parent
from narrowcast.jobs.plan import Plan
from narrowcast.jobs.planning import need_config, others, settle
from narrowcast.jobs.quantize import Result, patterns, run
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import resolve
from narrowcast.numbers.formats import formats
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import presets

TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def plan(
    model: str | Path,
    out: str | Path,
    to: str,
    *,
    preset: str | None = None,
    ignore: str | Iterable[str] = (),
    targets: str | Iterable[str] = (),
    dtype: str | None = None,
    requantize: bool = False,
    saturate: bool = False,
    parent: str | Path | None = None,
    workers: int | None = None,
) -> Plan:
    """Validate a conversion and lay out its result; nothing is written.

    ``to`` is a container's name, ``preset`` changes the scheme as well, ``dtype`` is what plain floats become
    (bf16 unless the
    source's own floats are all of one other dtype). ``requantize`` allows a second rounding, ``saturate`` a
    cast to fp16 that
    clips. Raises UsageError for what cannot be asked, InputError for sources that contradict themselves.
    """
    row = _target(to, preset, dtype, saturate)
    with open_model(model) as checkpoint:
        need_config(checkpoint, str(model))
        opened = open_coded(checkpoint)
        if row.name == opened.contents.container and preset is None and dtype is None:
            opened = as_it_is(opened)
        elif opened.contents.online:
            raise UsageError(
                "the model rotates activations, without which its weights mean something else", where=model,
                got="; ".join(opened.contents.online), wanted=f"a copy: --to {opened.contents.container}, no preset",
                remedy="convert the parent that was not rotated",
            )  # fmt: skip
        builder = Builder(opened, row, requantize=requantize)
        recipe, title = _recipe(preset, patterns(ignore), patterns(targets))
        resolved = resolve(recipe, opened.modules, others=others(checkpoint, opened.modules))
        chosen = None
        if opened.copied:
            pass
        elif row.name == PLAIN:
            chosen = dtype or _dtype(opened)
            _decode_all(builder, chosen, every=dtype is not None)
        else:
            builder.widths = tuple(a.module.out_in[1] for a in resolved.quantized)
            for assignment in resolved.assignments:
                if assignment.target is not None:
                    _refuse_decoded(builder, assignment.module.tensor)
                    builder.add(assignment, assignment.target)
                elif isinstance(opened.entries[assignment.module.tensor], Logical):
                    builder.carry(assignment.module)
            _refuse_empty(builder, model)
            _cast_decoded(builder)
        settled = settle(
            builder, str(model), Path(out), recipe, title or f"{opened.contents.container} to {row.name}", resolved,
            workers=workers, saturate=saturate, dtype=TORCH[chosen] if chosen else None, parent=parent, verb="convert",
        )  # fmt: skip
    check_parent(settled)
    return settled


def _target(to: str, preset: str | None, dtype: str | None, saturate: bool) -> Container:
    row = containers[to]
    if row.name == GGUF:
        raise UsageError(
            "a GGUF file is no directory", got=to, remedy="narrowcast.jobs.gguf.write_gguf writes one"
        )
    if row.document is None:
        raise UsageError(
            f"{row.name} is read and not written", got=to,
            wanted=", ".join(name for name, row in containers.items() if row.document is not None),
        )  # fmt: skip
    if dtype is not None and (row.name != PLAIN or dtype not in SOURCES):
        raise UsageError(
            "--dtype is what plain floats become", got=dtype, wanted="bf16, fp16 or fp32, with --to plain"
        )
    if saturate and dtype != "fp16":
        raise UsageError(
            "--saturate is about fp16, which clips what it cannot hold", remedy="--to plain --dtype fp16"
        )
    if preset is not None and row.name == PLAIN:
        raise UsageError(
            "a plain checkpoint has no preset",
            got=preset,
            remedy="leave out --preset, or choose another container",
        )
    return row


def _recipe(preset: str | None, ignore: tuple[str, ...], targets: tuple[str, ...]) -> tuple[Recipe, str]:
    if preset is None:
        if ignore or targets:
            raise UsageError(
                "--ignore and --targets say where a preset goes", remedy="add --preset, or leave them out"
            )
        return Recipe(()), ""
    name = presets[preset].name
    return Recipe.from_preset(name, ignore, targets, None), name


def _dtype(opened: Opened) -> str:
    """What most of the floats that are not quantized have, bf16 where there are none."""
    sizes: dict[str, int] = {}
    for tensor, entry in opened.entries.items():
        if tensor in opened.checkpoint.decoded:
            continue
        if isinstance(entry, Entry) and entry.dtype.format in SOURCES:
            name = entry.dtype.format
            sizes[name] = sizes.get(name, 0) + prod(entry.shape)
    return max(sizes, key=sizes.__getitem__, default="bf16")


def _decode_all(builder: Builder, dtype: str, *, every: bool) -> None:
    """Decode what is quantized, and cast what has no dtype of its own; with ``every`` all other floats too."""
    out, decoded = formats[dtype], builder.checkpoint.decoded
    of_tensor = {module.tensor: module for module in builder.modules}
    for name, entry in builder.opened.entries.items():
        if isinstance(entry, Logical):
            module = of_tensor.get(name)
            if module is None:
                raise builder.undecided(name)
            builder.decode(module, out)
        elif every or name in decoded:
            _cast(builder, entry, dtype)


def _cast(builder: Builder, entry: Entry, dtype: str) -> None:
    if entry.dtype.format in SOURCES and entry.dtype.format != dtype and prod(entry.shape):
        builder.cast(entry, formats[dtype])


def _cast_decoded(builder: Builder) -> None:
    """What is carried and has no dtype of its own gets that of the model's floats."""
    taken, dtype = {unit.source.tensor for unit in builder.units}, _dtype(builder.opened)
    for name in builder.checkpoint.decoded - taken:
        entry = builder.opened.entries[name]
        assert isinstance(entry, Entry)
        _cast(builder, entry, dtype)


def _refuse_decoded(builder: Builder, tensor: str) -> None:
    """Numbers that were decoded from blocks were rounded once already."""
    if tensor in builder.checkpoint.decoded and not builder.requantize:
        raise UsageError(
            f"{tensor} is quantized in a way that only decodes", where=builder.checkpoint.root,
            remedy="--requantize rounds it again; starting from the unquantized parent costs less",
        )  # fmt: skip


def _refuse_empty(builder: Builder, model: str | Path) -> None:
    if builder.units or builder.indivisible:
        return
    left = next((name for name, e in builder.opened.entries.items() if isinstance(e, Logical)), None)
    if left is not None:
        raise builder.undecided(left)
    raise UsageError(
        "nothing is quantized, and nothing was asked to be", where=model,
        remedy="--preset says what to quantize to, --to plain changes floats with --dtype",
    )  # fmt: skip


def convert(model: str | Path, out: str | Path, to: str, **options: Any) -> Result:
    """Plan and run in one call: ``convert("DeepSeek", "out", "plain")``. Options are those of ``plan``, and
    ``resume`` and
    ``progress`` of ``run``."""
    later: dict[str, Any] = {key: options.pop(key) for key in ("resume", "progress") if key in options}
    return run(plan(model, out, to, **options), **later)
