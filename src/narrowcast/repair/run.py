"""Carry out a repair: look, mend what has one right answer, write the result, and look again.

    audit (headers and scales) → mends → OUT, shards that do not change copied byte for byte → audit of OUT

What stays wrong afterwards is said, with what to run instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast._version import __version__
from narrowcast.audit.findings import Finding
from narrowcast.audit.opening import Found, open_anyway
from narrowcast.audit.run import Audit, audit
from narrowcast.containers import containers
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.plan import source_identity
from narrowcast.jobs.quantize import tell_of_resuming
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.repair.caches import kv_names, unity_kv
from narrowcast.repair.configs import Asked, rebuild
from narrowcast.repair.draft import Draft, Mended, New
from narrowcast.repair.scales import fused_outer
from narrowcast.store.folder import some
from narrowcast.store.header import Entry
from narrowcast.store.output import Output
from narrowcast.store.places import check_absent, check_place, place
from narrowcast.store.safetensors import Reader
from narrowcast.store.writer import Spec, Writer, layout
from narrowcast.tensors.presets import presets

COPY_BYTES = 4 << 20
Mend = Callable[[Draft, Asked], Iterator[Mended]]
# In this order: a config that is right makes layers readable that the others then see.
MENDS: Mapping[str, Mend] = {
    "index": lambda draft, asked: index(draft),
    "config": rebuild,
    "fused_outer": lambda draft, asked: fused_outer(draft),
    "kv_names": lambda draft, asked: kv_names(draft),
    "unity_kv": lambda draft, asked: unity_kv(draft),
}
ALIASES = {"ignore": "config"}  # findings tell them apart, the mend is one


@dataclass(frozen=True)
class Repaired:
    """What came of a repair: what was mended, what could not be, and what an audit of the result (of the source, for
    a dry run or where nothing was mended) still finds. ``left_out`` are weights in other formats beside
    the shards, which are the old ones and not copied."""

    model: str
    out: Path | None
    mended: tuple[Mended, ...]
    unmended: tuple[str, ...]
    left: tuple[Finding, ...]
    dry_run: bool
    left_out: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no error is left."""
        return not any(one.severity == "error" for one in self.left)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "out": str(self.out) if self.out else None, "dry_run": self.dry_run,
            "passed": self.passed, "mended": [one.to_json() for one in self.mended],
            "unmended": list(self.unmended), "left_out": list(self.left_out),
            "left": [one.to_json() for one in self.left],
        }  # fmt: skip


def repair(
    model: str | Path,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    unity: bool = False,
    container: str | None = None,
    preset: str | None = None,
    dry_run: bool = False,
    resume: bool = False,
    progress: ProgressFactory = Silent,
) -> Repaired:
    """Write a repaired copy of ``model`` to ``out``, see the module docstring.

    ``only`` restricts to repairs by name; ``unity`` writes KV cache scales of 1.0; ``container`` and ``preset`` say
    what a lost config said, where the tensors fit several. UsageError for names that do not exist and for an output
    that cannot be made; nothing is written where nothing is mended.
    """
    names = {*MENDS, *ALIASES}
    for name in only:
        if name not in names:
            raise UsageError("no such repair", got=name, wanted=", ".join(sorted(names)))
    if "unity_kv" in only and not unity:
        raise UsageError(
            "scales of 1.0 are written only where that is said", remedy="--unity-kv (unity=True) says it"
        )
    if container is not None:
        containers[container]  # raises for a name that does not exist, also where nothing needs it
    if preset is not None:
        presets[preset]
    target = place(out)
    check_place(target, Path(model))
    check_absent(target)
    before = audit(model, quick=True)
    found = open_anyway(model)
    draft = Draft(found, found.checkpoint.config_bytes)
    with found.checkpoint:
        _refuse_lost(found)
        for name in _wanted(before, only, unity):
            draft.mended += MENDS[name](draft, Asked(container, preset))
        if not draft.mended or dry_run:
            left = tuple(before.open_findings)
            return Repaired(str(model), None, tuple(draft.mended), tuple(draft.unmended), left, dry_run)
        write_draft(draft, target, resume, progress)
    after = audit(target, quick=True)
    return Repaired(
        str(model), Path(out), tuple(draft.mended), tuple(draft.unmended), tuple(after.open_findings), False,
        tuple(map(str, found.checkpoint.foreign_weights)),
    )  # fmt: skip


def _wanted(before: Audit, only: Sequence[str], unity: bool) -> list[str]:
    """The repairs to try, in order. Those of tensors see for themselves whether there is anything to do; a config or
    an index is written anew only where something is said against it."""
    found, said = before.subject.found, {one.repair for one in before.findings}
    asked = {"fused_outer", "kv_names"} | ({"unity_kv"} if unity else set())
    asked |= (
        {"config"} if said & {"config", "ignore"} or found.layer_refusals or found.opened is None else set()
    )
    asked |= {"index"} if "index" in said or found.file_refusals else set()
    chosen = {ALIASES.get(name, name) for name in only}
    return [name for name in MENDS if name in asked and (not chosen or name in chosen)]


def index(draft: Draft) -> Iterator[Mended]:
    """The index anew, which every output gets; a tensor that lies in two shards stays in the first, if both are the
    same."""
    found = draft.found
    for name, (kept, other) in found.doubled.items():
        shard = found.checkpoint.root / other
        with Reader(shard) as reader:
            same = np.array_equal(reader.array(name), found.checkpoint.array(name))
        if not same:
            raise InputError(
                f"tensor {name!r} is in two shards with different values", where=found.checkpoint.root,
                got=f"{kept} and {other}", remedy="remove the one that is stale, then repair again",
            )  # fmt: skip
        draft.rewritten.add(shard)
    yield Mended(
        "index", "the index is written anew from the shards", tuple(found.doubled) or ("all tensors",)
    )


def _refuse_lost(found: Found) -> None:
    """Refuse to make a checkpoint look whole that is not: a shard that cannot be read, tensors that the index lists
    and nothing holds."""
    checkpoint = found.checkpoint
    top = [file for file in found.files if len(file.parts) == 1]
    unread = [
        f.name for f in top if f.suffix == ".safetensors" and checkpoint.root / f not in checkpoint.shards
    ]
    if unread and found.file_refusals:
        raise InputError(
            f"{len(unread)} shards cannot be read, and their tensors are lost", where=checkpoint.root,
            got=some(unread, 3), remedy="download or copy them again",
        )  # fmt: skip
    for file in top:
        if not _is_index(file):
            continue
        try:
            table = json.loads((checkpoint.root / file).read_bytes()).get("weight_map") or {}
        except (ValueError, AttributeError, OSError):
            continue  # an index that says nothing lists nothing; it is written anew
        lost = [str(name) for name in table if name not in checkpoint.entries]
        if lost:
            raise InputError(
                f"the index lists {len(lost)} tensors that no shard has", where=checkpoint.root / file,
                got=some(lost, 3), remedy="find the shards that hold them, or download the checkpoint again",
            )  # fmt: skip


def write_draft(draft: Draft, target: Path, resume: bool, progress: ProgressFactory) -> None:
    """The checkpoint as a draft has it: what does not change is copied byte for byte."""
    checkpoint = draft.checkpoint
    plans = {shard: draft.shard_specs(shard) for shard in checkpoint.shards}
    sizes = {shard: layout([spec for spec, _ in plan.values()]).size for shard, plan in plans.items()}
    sides = [name for name in checkpoint.side_files if str(name) not in draft.beside and not _is_index(name)]
    forecast = sum(sizes.values()) + sum((checkpoint.root / name).stat().st_size for name in sides)
    job = {
        "narrowcast": __version__,
        "repair": [one.said for one in draft.mended],
        **source_identity(checkpoint),
    }
    bar = progress(sum(sizes.values()), "writing")
    with Output.begin(target, job, forecast=forecast, resume=resume, source=checkpoint.root) as output:
        try:
            for shard, plan in plans.items():
                if draft.changes(shard):
                    _rewrite(draft, output, shard, plan)
                else:
                    output.copy(shard, shard.name)
                bar.advance(sizes[shard])
            for name in sides:
                output.copy(checkpoint.root / name, name)
            for beside, content in draft.beside.items():
                if content is not None:
                    output.put(beside, content)
            output.commit(draft.config)
        except BaseException as error:
            tell_of_resuming(error)
            raise
    bar.done()


def _is_index(name: Path) -> bool:
    return name.name.endswith(".safetensors.index.json")


def _rewrite(draft: Draft, output: Output, shard: Path, plan: Mapping[str, tuple[Spec, Entry | New]]) -> None:
    specs = [spec for spec, _ in plan.values()]
    metadata = draft.checkpoint.metadata.get(shard.name)
    if output.done(shard.name, specs, metadata):
        return
    with output.writer(shard.name, specs, metadata) as writer:
        for name, (_, content) in plan.items():
            if isinstance(content, New):
                writer.write(name, np.ascontiguousarray(content.make()))
            else:
                _copy(draft, writer, name, content)
        writer.finish()


def _copy(draft: Draft, writer: Writer, name: str, entry: Entry) -> None:
    for at in range(0, entry.nbytes, COPY_BYTES):
        data = np.empty(min(COPY_BYTES, entry.nbytes - at), np.uint8)
        draft.checkpoint.read_into(entry.name, data, at)
        writer.write(name, data, at)
