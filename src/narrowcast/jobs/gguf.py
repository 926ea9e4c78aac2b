"""Write a model, from whatever container, as one GGUF file with its config and vocabulary inside.

    a matrix whose scheme a block holds       moved: codes and scales bit for bit, or the same values where groups are
                                              cut into blocks of 32
    any other quantized matrix                decoded; rounded again into the wanted type where that was asked for
    plain floats                              the dtype they have, or ggml's own rule for the wanted type

Rows go straight from the source to their place in the file, in the row order and with the shifted norms of llama.cpp
(model/gguf_names). Everything is written under a temporary name, read back and compared by checksum, and opened as a
model before the file gets its own name.

Left out: resuming, since one file is one piece of work; scales of inputs and of KV caches, which llama.cpp does
not read for these types.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.gguf_blocks import (
    BLOCKS,
    WRITTEN,
    BlockType,
    block_type,
    dequantize,
    join,
    quantize,
)
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.coded import Coded, Logical, Opened, open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.planning import need_config
from narrowcast.jobs.stream import ProgressFactory, Silent, Workers, chunks
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.model.gguf_config import FILE_TYPES, GGUFHead, gguf_of_config
from narrowcast.model.gguf_model import GGUFModel, placed, row_multiple, specs, tensor_type
from narrowcast.model.gguf_names import Family, Move, Shape, family_of_config, moves_to_gguf
from narrowcast.model.gguf_vocabulary import vocabulary_fields
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import FP32, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.gguf import GGML_TYPES, GGMLType, GGUFFile, is_gguf
from narrowcast.store.gguf_writer import GGUFSpec, gguf_writer
from narrowcast.store.safetensors import Entry, Reader
from narrowcast.store.writer import Writer, as_bytes
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.misfits import Misfits, possible
from narrowcast.tensors.recode import recode

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
CHUNK_BYTES = 4 << 20  # of fp32 values that are worked on at once
PLAIN = ("F32", "F16", "BF16")
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass
class GGUFResult:
    """What was written: matrices by (what they were, type, how), what rounding lost, and notes."""

    out: Path
    nbytes: int
    architecture: str
    matrices: dict[tuple[str, str, str], int]
    errors: Errors
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "bytes": self.nbytes,
            "architecture": self.architecture,
            "matrices": [
                {"from": before, "type": kind, "how": how, "count": count}
                for (before, kind, how), count in self.matrices.items()
            ],
            "sqnr_db": round(self.errors.sqnr, 3) if isfinite(self.errors.sqnr) else None,
            "notes": self.notes,
        }


def write_gguf(
    model: str | Path,
    out: str | Path,
    *,
    kind: str | None = None,
    requantize: bool = False,
    workers: int | None = None,
    progress: ProgressFactory | None = None,
) -> GGUFResult:
    """Write ``model`` as the GGUF file ``out``. ``kind`` is the type of its matrices (f16, bf16, f32, q8_0, q4_0, q4_1,
    mxfp4, nvfp4); without it they keep what they are. ``requantize`` allows a second rounding.

    Raises UsageError for a family, type or tokenizer that cannot be written, or an output that exists; InputError
    for a source that contradicts itself.
    """
    wanted = _kind(kind)
    out = Path(out)
    if out.suffix != ".gguf":
        raise UsageError("the output is one file", got=out.name, wanted="a name that ends in .gguf")
    with open_model(model) as checkpoint, Workers(workers) as pool:
        need_config(checkpoint, str(model))
        opened = open_coded(checkpoint)
        plan = _plan(opened, out, wanted, requantize)
        fields = plan.head.fields | _vocabulary(checkpoint)
        with gguf_writer(out, plan.specs, fields) as writer:
            work = _Work(opened, plan, writer)
            _write_all(work, pool, progress or Silent)
            work.refuse_misfits(requantize)
            _check(work, pool)
            writer.finish()
    notes = [*plan.head.notes, *opened.contents.notes, *work.notes()]
    return GGUFResult(out, out.stat().st_size, plan.family.architecture, plan.counts(), work.errors, notes)


def _kind(kind: str | None) -> str | None:
    if kind is None:
        return None
    if kind.upper() not in WRITTEN:
        raise UsageError("no GGUF type to write", got=kind, wanted=", ".join(map(str.lower, WRITTEN)))
    return kind.upper()


@dataclass(frozen=True)
class _Step:
    """One Hugging Face tensor on its way: where it goes, as what, and how it gets there (moved, kept, decoded, rounded,
    rounded again)."""

    move: Move
    shape: Shape
    kind: GGMLType
    how: str
    source: Coded | Entry


@dataclass
class _Plan:
    family: Family
    head: GGUFHead
    specs: list[GGUFSpec]
    steps: list[_Step]
    outer: dict[str, F32]

    def counts(self) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for step in self.steps:
            if len(step.shape) == 2:
                coded = isinstance(step.source, Coded)
                before = step.source.how.scheme.name if coded else step.source.dtype.format  # type: ignore[union-attr]
                key = (str(before), step.kind.name, step.how)
                found[key] = found.get(key, 0) + 1
        return dict(sorted(found.items()))


def _plan(opened: Opened, out: Path, wanted: str | None, requantize: bool) -> _Plan:
    """Everything that can be refused is refused here."""
    checkpoint, config = opened.checkpoint, opened.checkpoint.config or {}
    family = family_of_config(config, checkpoint.root)
    draft = gguf_of_config(family, config, out.stem, wanted or "BF16")
    names = {name: entry.shape for name, entry in opened.entries.items()}
    moves = moves_to_gguf(family, names, draft.fields, bool(checkpoint.tied))
    coded = {name: source for module in opened.modules for name, source in _coded(opened, module)}

    def choose(name: str, shape: Shape, members: Sequence[Move]) -> GGMLType:
        if wanted is not None:
            return tensor_type(name, shape, wanted)
        kinds = {_own_type(opened, move, coded) for move in members}
        if len(kinds) > 1:
            raise UsageError(
                f"the experts of {name} differ", got=", ".join(sorted(kinds)), remedy="--type says one"
            )
        return tensor_type(name, shape, kinds.pop())

    found = specs(moves, names, choose)
    kinds = {spec.name: spec.type for spec in found}
    steps = [_step(opened, move, names[move.name], kinds[move.gguf], coded, requantize) for move in moves]
    outer = _outers(opened, steps)
    most = wanted or _most(found)
    head = replace(draft, fields=draft.fields | {"general.file_type": FILE_TYPES[most]})
    beside = [GGUFSpec(name, GGML_TYPES["F32"], v.shape) for name, v in (head.tensors | outer).items()]
    return _Plan(family, head, [*beside, *found], steps, outer)


def _coded(opened: Opened, module: Any) -> list[tuple[str, Coded]]:
    if not isinstance(opened.entries[module.tensor], Logical) or module.experts is not None:
        return []
    return [(module.tensor, coded) for _, coded in opened.coded(module)]


def _own_type(opened: Opened, move: Move, coded: Mapping[str, Coded]) -> str:
    """The type that holds a tensor as it is."""
    source = coded.get(move.name)
    if source is None:
        entry = opened.entries[move.name]
        if isinstance(entry, Entry) and entry.dtype.format in DTYPES:
            return DTYPES[entry.dtype.format]
        raise UsageError(
            f"{move.name} cannot be written to a GGUF file", wanted="a matrix of floats or codes"
        )
    exact = block_type(source.how.scheme)
    alike = [row for row in BLOCKS.values() if row.scheme.element == source.how.scheme.element]
    reasons = []
    for row in (*([exact] if exact else []), *alike):
        reason = _why_not(source, row)
        if reason is None:
            return row.type.name
        reasons.append(f": {reason}")
    raise UsageError(
        f"no GGUF type holds {move.name} as it is", got=f"{source.how.scheme.name}{reasons[0] if reasons else ''}",
        wanted="int8 or int4 in symmetric groups of 32, mxfp4 or nvfp4",
        remedy="--type bf16 decodes it; --type q8_0 --requantize rounds it again",
    )  # fmt: skip


def _why_not(source: Coded, row: BlockType) -> str | None:
    """Why the values of a quantized matrix are not those of a block type, or None."""
    if source.how.part("order") is not None or source.how.part("pre_scale") is not None:
        return "its columns are shuffled or scaled, which blocks cannot say"
    if source.shape[1] % row.type.block:
        return f"{source.shape[1]} columns are no whole blocks of {row.type.block}"
    element, held = source.how.scheme.element, row.scheme.element
    if element != held and element.bits >= held.bits:
        return f"elements are {element.name}, not {held.name}"
    return possible(source.how.scheme, row.scheme)


def _step(
    opened: Opened, move: Move, shape: Shape, kind: GGMLType, coded: Mapping[str, Coded], requantize: bool
) -> _Step:
    source: Coded | Entry
    if move.name in coded:
        source, row = coded[move.name], BLOCKS.get(kind.name)
        reason = "" if row is None else _why_not(source, row)
        if row is not None and reason is None:
            return _Step(move, shape, kind, "moved", source)
        if kind.name in PLAIN:
            return _Step(move, shape, kind, "decoded", source)
        if not requantize:
            raise UsageError(
                f"{move.name} cannot become {kind.name} without a second rounding",
                got=reason or source.how.scheme.name,
                remedy="--requantize rounds again; starting from the unquantized parent costs less",
            )  # fmt: skip
        return _Step(move, shape, kind, "rounded again", source)
    entry = opened.entries[move.name]
    if not isinstance(entry, Entry) or entry.dtype.format not in DTYPES:
        raise UsageError(
            f"{move.name} cannot be written to a GGUF file", wanted="a matrix of floats or codes"
        )
    if move.name in opened.checkpoint.decoded and len(shape) > 1 and kind.name not in PLAIN:
        if not requantize:
            raise UsageError(
                f"{move.name} was decoded from blocks: {kind.name} would be a second rounding",
                remedy="--requantize rounds again; starting from the unquantized parent costs less",
            )
        return _Step(move, shape, kind, "rounded again", entry)
    exact = DTYPES[entry.dtype.format] == kind.name or kind.name == "F32"
    return _Step(move, shape, kind, "as it is" if exact and not move.shift else "rounded", entry)


def _most(found: Sequence[GGUFSpec]) -> str:
    sizes: dict[str, int] = {}
    for spec in found:
        if len(spec.shape) > 1:
            sizes[spec.type.name] = sizes.get(spec.type.name, 0) + prod(spec.shape)
    return max(sizes, key=sizes.__getitem__)


def _outers(opened: Opened, steps: Sequence[_Step]) -> dict[str, F32]:
    """Outer scales of moved NVFP4 matrices, one for each of a stack, where they are not all 1."""
    found: dict[str, list[float]] = {}
    for step in steps:
        if step.how == "moved" and step.kind.name == "NVFP4" and isinstance(step.source, Coded):
            found.setdefault(step.move.outer, []).append(step.source.outer(opened.checkpoint) or 1.0)
    return {name: np.array(scales, np.float32) for name, scales in found.items() if set(scales) != {1.0}}


def _vocabulary(checkpoint: Checkpoint) -> dict[str, Any]:
    if is_gguf(checkpoint.root):
        with GGUFFile(checkpoint.root) as file:
            return {key: value for key, value in file.fields.items() if key.startswith("tokenizer.")}
    return vocabulary_fields(checkpoint.root, checkpoint.config or {})


class _Work:
    """The state of one writing: sums of errors, misfits, checksums of what was written."""

    def __init__(self, opened: Opened, plan: _Plan, writer: Writer) -> None:
        self.source, self.plan, self.writer = opened.checkpoint, plan, writer
        self.errors = Errors()
        self.misfits: dict[str, Misfits] = {}
        self.sums: dict[tuple[str, int], tuple[int, int]] = {}

    def tasks(self) -> list[tuple[_Step, int, int]]:
        found = []
        for step in self.plan.steps:
            rows, columns = (step.shape[0], 1) if len(step.shape) == 1 else (step.shape[0], step.shape[-1])
            multiple = row_multiple(step.move, step.shape)
            if isinstance(step.source, Coded):
                multiple = int(np.lcm(multiple, step.source.how.row_multiple))
            found += [(step, i, j) for i, j in chunks(rows, 4 * columns, multiple, CHUNK_BYTES)]
        return found

    def rows(self, step: _Step, start: int, stop: int) -> tuple[U8, Errors, Misfits]:
        """Stored rows of one chunk, what they lost, and what of a moved one has no equal."""
        if step.how == "moved":
            stored, misfits = self._moved(step, start, stop)
            return stored, Errors(), misfits
        values = self._values(step, start, stop)
        stored = quantize(step.kind, values)
        if step.how == "as it is":
            return stored, Errors(), Misfits()
        x, y = values.astype(np.float64), dequantize(step.kind, stored)
        return stored, Errors(x.size, float(np.square(x).sum()), float(np.square(x - y).sum())), Misfits()

    def _moved(self, step: _Step, start: int, stop: int) -> tuple[U8, Misfits]:
        source, row = step.source, BLOCKS[step.kind.name]
        assert isinstance(source, Coded)
        outer = source.outer(self.source)
        q = qtensor(
            source.rows(self.source, start, stop),
            source.how.scheme,
            source.how.packing,
            source.shape[1],
            outer,
        )
        made = recode(q, row.scheme, outer if row.scheme.outer is not None else None, nearest=True, row=start)
        assert made.nearest is not None
        return join(row, made.nearest.codes, made.nearest.scales[0]), made.misfits

    def _values(self, step: _Step, start: int, stop: int) -> F32:
        """Values as the GGUF file holds them, float32 [rows, K]; a vector is a column."""
        source = step.source
        if isinstance(source, Coded):
            return source.decode(self.source, start, stop, FP32)
        if len(step.shape) == 1:
            stored = self.source.rows(source.name, 0, 1)[:, start:stop].reshape(-1, 1)
        else:
            stored = self.source.rows(source.name, start, stop)
        return widen(stored, formats[str(source.dtype.format)]) + np.float32(step.move.shift)

    def write(self, task: tuple[_Step, int, int]) -> tuple[_Step, int, Errors, Misfits]:
        step, start, stop = task
        stored, lost, misfits = self.rows(step, start, stop)
        name, data, at = placed(step.move, step.kind, step.shape, start, stored)
        self.writer.write(name, data, at)
        self.sums[name, at] = (data.nbytes, zlib.crc32(as_bytes(data)))
        return step, stop - start, lost, misfits

    def refuse_misfits(self, requantize: bool) -> None:
        """A moved matrix keeps every value, unless rounding was allowed."""
        bad = {name: found for name, found in self.misfits.items() if not found.exact}
        if bad and not requantize:
            name, found = next(iter(bad.items()))
            scheme = next(BLOCKS[s.kind.name].scheme for s in self.plan.steps if s.move.name == name)
            raise UsageError(
                f"{len(bad)} matrices have values that no block of their type holds", where=name,
                got=found.words(scheme), remedy="--requantize takes the nearest, --type bf16 decodes",
            )  # fmt: skip

    def notes(self) -> list[str]:
        again = sum(step.how == "rounded again" for step in self.plan.steps)
        found = [f"{again} matrices were rounded a second time"] if again else []
        bad = [name for name, misfits in self.misfits.items() if not misfits.exact]
        return found + (
            [f"{len(bad)} matrices were moved to the nearest values, first {bad[0]}"] if bad else []
        )


def _write_all(work: _Work, pool: Workers, progress: ProgressFactory) -> None:
    tasks = work.tasks()
    bar = progress(sum((j - i) * prod(step.shape[1:]) for step, i, j in tasks), "write")
    for name, value in (work.plan.head.tensors | work.plan.outer).items():
        work.writer.write(name, value)
    with pool.map(work.write, tasks) as results:
        for step, rows, lost, misfits in results:
            work.errors += lost
            if step.how == "moved":
                work.misfits[step.move.name] = work.misfits.get(step.move.name, Misfits()) + misfits
            bar.advance(rows * prod(step.shape[1:]))
    bar.done()


def _check(work: _Work, pool: Workers) -> None:
    """Open the file as a model, and read back all that was written."""
    with GGUFModel.open(work.writer.temporary) as model:
        missing = work.plan.steps and {step.move.name for step in work.plan.steps} - model.moves.keys()
        if missing:
            raise InputError(f"{min(missing)} is not in the file that was written", where=work.writer.path)
        pool.run(_comparison(model.file, work.sums), list(work.sums))


def _comparison(
    file: Reader, sums: Mapping[tuple[str, int], tuple[int, int]]
) -> Callable[[tuple[str, int]], None]:
    def compare(at: tuple[str, int]) -> None:
        size, checksum = sums[at]
        back = np.empty(size, np.uint8)
        file.read_into(at[0], back, at[1])
        if zlib.crc32(as_bytes(back)) != checksum:
            raise InputError(f"{at[0]} reads back differently from what was written", where=file.path)

    return compare
