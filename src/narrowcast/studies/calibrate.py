"""Run text through a model and keep what its layers saw: statistics for static scales, layer by layer.

    for layer i:   weights of layer i in memory; every piece of text goes through it, watched
                   OUT.partial/hidden-(i+1)      hidden states behind the layer
                   OUT.partial/layer-i           its statistics; written last, so that it says that i is done
    OUT = all layers in one file, renamed into place

Killed at any time there is no OUT, and ``resume`` goes on behind the last finished layer from the very hidden states
that it left, so the bytes are those of a run that nobody disturbed.

The model runs in its own dtype unless told otherwise, and a quantized one with its own arithmetic: ranges are those of
the model that is run. Left out: the head's input (heads stay wide in every preset), and embeddings, which have none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from narrowcast._version import __version__
from narrowcast.errors import StorageError, UsageError
from narrowcast.jobs.cache_scales import CacheScales
from narrowcast.jobs.fingerprint import fingerprint, kinship
from narrowcast.jobs.stats import Stats, Text, read, write
from narrowcast.jobs.stats import merge as merge_two
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.runtime.caches import KVScales
from narrowcast.runtime.walk import Running, State
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.places import check_absent, check_place, lock, make_partial, partial_path, place
from narrowcast.store.safetensors import Reader, Spec, Writer
from narrowcast.store.writer import storage_error
from narrowcast.studies.ranges import Watch
from narrowcast.studies.tokens import shared
from narrowcast.texts.documents import Corpus, Piece
from narrowcast.texts.documents import read as read_text

TOKENS, CONTEXT = 16384, 2048
FEW = 2048  # tokens below which maxima are low: docs/calibrate.md has what was seen
_JOB = "job.json"
_LAYER = re.compile(r"layer-(\d{5})\.safetensors")
_CARRIERS = {torch.float32: ("F32", "<f4"), torch.bfloat16: ("BF16", "<u2"), torch.float16: ("F16", "<f2")}


@dataclass(frozen=True)
class Calibrated:
    """A finished calibration: the file, what is in it, the seconds it took, and the first token ids that ran."""

    out: Path
    stats: Stats
    seconds: float = 0.0
    first: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out), "seconds": round(self.seconds, 3), "first_ids": list(self.first),
            **summary(self.stats), "notes": list(self.notes),
        }  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """What makes the maxima lower than those that will come."""
        found, pieces = [], sum(text.pieces for text in self.stats.texts)
        if self.stats.tokens < FEW:
            found.append(
                f"{self.stats.tokens} tokens are few: maxima of so little text are low, and what passes them later "
                f"clips; give {FEW} or more"
            )
        if pieces == 1:
            found.append("one piece of text: other documents have other maxima; give several")
        return tuple(found)


def summary(stats: Stats) -> dict[str, Any]:
    """Statistics as stable keys: who, how much text, amax by linear, keys and values by layer, starved experts."""
    return {
        "model": stats.model, "fingerprint": stats.fingerprint, "dtype": stats.dtype, "tokens": stats.tokens,
        "texts": [vars(text) for text in stats.texts],
        "inputs": {name: seen.amax for name, seen in stats.inputs.items()},
        "caches": {
            path: {
                which: {
                    "amax": seen.amax, "heads": seen.channels.tolist(), "elements": seen.elements,
                    "beyond_448": seen.beyond(448.0),
                }
                for which, seen in both.items()
            }
            for path, both in stats.caches.items()
        },
        "starved": stats.starved,
    }  # fmt: skip


def calibrate(
    model: str | Path,
    out: str | Path,
    sources: Sequence[str] = (),
    *,
    tokens: int | None = TOKENS,
    context: int = CONTEXT,
    dtype: str | None = None,
    resume: bool = False,
    progress: ProgressFactory = Silent,
) -> Calibrated:
    """Write the statistics of ``model`` on a text to the file ``out``; see the module docstring.

    Raises UsageError for an output that exists or text that is not there, NonFiniteError where the model itself
    computes NaN or infinity, StorageError where another run holds the output or began another job there.
    """
    started = perf_counter()
    target = place(out)
    check_place(target, Path(model))
    if target.is_dir():
        raise UsageError("the output is a directory", where=target, wanted="the name of a file to make")
    check_absent(target)
    corpus = read_text(sources)
    with Running.open(model, dtype) as run:
        pieces = shared(run, None, corpus, context, tokens).pieces
        begun = begin(run, str(model), [corpus_text(corpus, pieces, context)])
        with _Partial(target, begun, run.depth, resume) as partial:
            _walk(run, pieces, begun, partial, progress)
            stats = partial.whole(begun)
            _save(stats, target)
            partial.remove()
    return Calibrated(Path(out), stats, perf_counter() - started, pieces[0].ids[:8])


def begin(run: Running, model: str, texts: Sequence[Text]) -> Stats:
    """Statistics of a model, still empty."""
    given = Path(model)
    name = given.resolve().name if given.exists() else model
    dtype = str(run.dtype).removeprefix("torch.")
    return Stats(name, fingerprint(run.opened.checkpoint), kinship(run.opened), dtype, tuple(texts))


def corpus_text(corpus: Corpus, pieces: Sequence[Piece], context: int) -> Text:
    return Text(corpus.name, corpus.sha256, sum(len(piece.ids) for piece in pieces), len(pieces), context)


def _walk(
    run: Running, pieces: Sequence[Piece], begun: Stats, partial: _Partial, progress: ProgressFactory
) -> None:
    done = partial.done()
    states = [run.begin(torch.tensor(piece.ids)) for piece in pieces]
    if done:
        partial.restore(done, states)
    shown = progress((run.depth - done) * begun.tokens, "calibrating")
    for i in range(done, run.depth):
        seen = watch_layer(run, i, states, begun)
        partial.keep(i, states, seen)
        shown.advance(begun.tokens)
    shown.done()


def watch_layer(run: Running, i: int, states: Sequence[State], begun: Stats) -> Stats:
    """Take every state through layer ``i`` and return what it saw."""
    seen = Stats(begun.model, begun.fingerprint, begun.kin, begun.dtype, begun.texts)
    layer = run.layer(i)
    watch = Watch(run, i, layer, seen, len(states))
    with watch.watching():
        for watch.piece, state in enumerate(states):
            run.step(layer, i, state, watch.cache)
    return seen


class _Partial:
    """OUT.partial: what is finished so far, held by this process alone."""

    def __init__(self, out: Path, begun: Stats, depth: int, resume: bool) -> None:
        self.path, self.depth = partial_path(out), depth
        there = make_partial(self.path, 0, resume)
        self._lock, _ = lock(self.path)
        job = {
            "narrowcast": __version__, "fingerprint": begun.fingerprint, "dtype": begun.dtype,
            "texts": [vars(text) for text in begun.texts],
        }  # fmt: skip
        try:
            self._adopt(job, there)
        except BaseException:
            os.close(self._lock)
            raise

    def _adopt(self, job: Mapping[str, Any], there: bool) -> None:
        record = self.path / _JOB
        if there and record.exists():
            begun = json.loads(record.read_bytes())
            differ = [key for key in job if begun.get(key) != job[key]]
            if differ:
                raise StorageError(
                    "the partial output belongs to another calibration", where=self.path,
                    got=f"another {', '.join(differ)}", remedy=f"the same options as before, or remove {self.path}",
                )  # fmt: skip
        else:
            temporary = record.with_name(f"{_JOB}.tmp")
            temporary.write_text(json.dumps(job, sort_keys=True))
            os.rename(temporary, record)
        for left in self.path.glob("*.tmp"):  # a file that was being written when the run ended
            left.unlink()

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _layer(self, i: int) -> Path:
        return self.path / f"layer-{i:05d}.safetensors"

    def _hidden(self, i: int) -> Path:
        return self.path / f"hidden-{i:05d}.safetensors"

    def done(self) -> int:
        """How many layers are finished."""
        return next((i for i in range(self.depth) if not self._layer(i).exists()), self.depth)

    def keep(self, i: int, states: Sequence[State], seen: Stats) -> None:
        """Layer i is finished: its hidden states, its statistics, and then the older states are not needed."""
        self._hidden(i + 1).unlink(missing_ok=True)  # of a run that ended between the two
        _write_states(self._hidden(i + 1), states)
        write(seen, self._layer(i))
        self._hidden(i).unlink(missing_ok=True)

    def restore(self, i: int, states: Sequence[State]) -> None:
        """The hidden states in front of layer i."""
        with Reader(self._hidden(i)) as reader:
            for number, state in enumerate(states):
                stored = torch.from_numpy(reader.array(f"piece.{number}").copy())
                state.hidden = stored.view(state.hidden.dtype).reshape(state.hidden.shape)

    def whole(self, begun: Stats) -> Stats:
        """All layers in one."""
        for i in range(self.depth):
            seen = read(self._layer(i))
            for field in ("inputs", "caches", "layer_of", "experts"):
                getattr(begun, field).update(getattr(seen, field))
        return begun

    def remove(self) -> None:
        shutil.rmtree(self.path)


def _write_states(path: Path, states: Sequence[State]) -> None:
    name, carrier = _CARRIERS[states[0].hidden.dtype]
    specs = [Spec(f"piece.{n}", DTYPES[name], tuple(state.hidden.shape)) for n, state in enumerate(states)]
    with Writer(path, specs) as writer:
        for n, state in enumerate(states):
            bits = state.hidden.contiguous().view(torch.uint8).numpy().view(carrier)
            writer.write(f"piece.{n}", bits)
        writer.finish()


def _save(stats: Stats, out: Path) -> None:
    """The finished file; one that a killed run left half written makes room."""
    out.with_name(out.name + ".tmp").unlink(missing_ok=True)
    try:
        write(stats, out)
    except OSError as error:
        raise storage_error(error, out, 0) from error


def merge(files: Sequence[str | Path], out: str | Path) -> Calibrated:
    """Several files of statistics of one model as one, texts in the order of the files.

    Raises UsageError where the models differ, or the output exists.
    """
    if len(files) < 2:
        raise UsageError("nothing to merge", got=f"{len(files)} file", wanted="two files or more")
    target = place(out)
    check_absent(target)
    started = perf_counter()
    stats = read(files[0])
    for file in files[1:]:
        stats = merge_two(stats, read(file))
    _save(stats, target)
    return Calibrated(Path(out), stats, perf_counter() - started)


def kv_scales(scales: CacheScales) -> KVScales:
    """Scales as a cache takes them, by layer."""
    return KVScales(k=scales.by_layer("k"), v=scales.by_layer("v"))
