"""Scales of a KV cache, and what they are worth: measured beside the wide cache, on text they were not made from.

    unity        every scale 1.0, what engines take where a checkpoint brings none: |x| beyond 448 saturates
    computed     amax / 448 for the keys of a layer, and for its values
    per head     amax / 448 for each head

All runs of one model side by side: the same weights, the same token ids, FP8 E4M3 keys and values as they are stored.
KL is that of the run with a wide cache from each of them, in nats per token, its interval over documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import UsageError
from narrowcast.jobs.cache_scales import CacheScales, read_overlay, write_overlay
from narrowcast.jobs.fingerprint import fingerprint, kinship
from narrowcast.jobs.stats import Stats, Text, check_stat, read
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.runtime.caches import CacheFactory, KVScales
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.walk import Running
from narrowcast.store.places import check_absent, place
from narrowcast.studies.calibrate import CONTEXT, TOKENS, begin, corpus_text, kv_scales, watch_layer
from narrowcast.studies.evaluation import Gap
from narrowcast.studies.measure import Beside
from narrowcast.studies.tokens import shared
from narrowcast.texts.documents import Corpus, Piece
from narrowcast.texts.documents import read as read_text

MEASURED, SHORT = 1024, 128  # tokens that the divergence is measured on, in pieces of several documents


@dataclass(frozen=True)
class Measured:
    """One cache beside the wide one: how far its predictions are, and the shares of keys and values that it clipped."""

    name: str
    gap: Gap
    keys_clipped: float
    values_clipped: float

    def to_json(self) -> dict[str, Any]:
        gap = self.gap
        return {
            "name": self.name, "kl": vars(gap.kl), "top1": vars(gap.top1), "identical": gap.identical,
            "keys_clipped": self.keys_clipped, "values_clipped": self.values_clipped,
        }  # fmt: skip


@dataclass(frozen=True)
class KVCalibration:
    """Scales for one checkpoint, with the statistics that they came from (None: from an overlay) and what was measured
    on so many predictions of ``text``. ``fresh``: in documents that the scales were not made from, None where that is
    not known. ``kin``: the scales are of its parent."""

    model: str
    scales: CacheScales
    fingerprint: str
    stats: Stats | None
    measured: tuple[Measured, ...] = ()
    tokens: int = 0
    kin: bool = False
    layers: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    text: Text | None = None
    fresh: bool | None = None

    @property
    def conclusion(self) -> str:
        """In words what the measured caches say of each other; nothing where none was measured."""
        return concluded(self.measured)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "of": self.scales.model, "kin": self.kin, "kv": self.scales.kv,
            "stat": self.scales.stat, "sha256": self.scales.sha256, "layers": list(self.layers),
            "measured_tokens": self.tokens, "measured": [one.to_json() for one in self.measured],
            "measured_text": vars(self.text) if self.text is not None else None, "fresh_text": self.fresh,
            "conclusion": self.conclusion,
        }  # fmt: skip


def calibrate_kv(
    model: str | Path,
    sources: Sequence[str] = (),
    *,
    stats: str | Path | None = None,
    stat: str = "amax",
    heads: bool = False,
    tokens: int = TOKENS,
    context: int = CONTEXT,
    measure: int = MEASURED,
    dtype: str | None = None,
    progress: ProgressFactory = Silent,
) -> KVCalibration:
    """Scales for the KV cache of ``model``, from a file of statistics or an overlay, or from text; see the module
    docstring.

    ``stats`` may be of the model's unquantized parent. Text is for both: ``tokens`` of it make the scales where no file
    does, and ``measure`` of its other documents measure. Raises UsageError for statistics of another model.
    """
    check_stat(stat)
    given = read_overlay(stats) if stats is not None else None
    seen = read(stats) if stats is not None and given is None else None
    with Running.open(model, dtype) as run:
        checkpoint = run.opened.checkpoint
        own, kin = fingerprint(checkpoint), kinship(run.opened)
        corpus = read_text(sources)
        first: Sequence[Piece] = ()
        if given is None and seen is None:
            first = shared(run, None, corpus, context, tokens).pieces
            seen = begin(run, str(model), [corpus_text(corpus, first, context)])
            _watch(run, first, seen, progress)
        rest = _rest(corpus, first)
        last = shared(run, None, rest, SHORT, measure).pieces if measure else []
        scheme = "fp8_head" if heads else "fp8"
        scales = given if given is not None else CacheScales.of(seen, stat, scheme)  # type: ignore[arg-type]
        scales.check_model(own, kin, model)
        if heads and scales.kv != scheme:
            raise UsageError(
                "this overlay has no scales of single heads", where=stats, remedy="leave out --heads"
            )
        rows = _measure(run, last, _modes(scales, seen, stat), progress) if measure else ()
    counted = sum(len(piece.ids) - 1 for piece in last) if measure else 0
    return KVCalibration(
        str(model), scales, own, seen, rows, counted, scales.fingerprint != own, _layers(scales, seen),
        corpus_text(corpus, last, SHORT) if measure else None, _fresh(corpus, rest, first, seen),
    )  # fmt: skip


def concluded(rows: Sequence[Measured]) -> str:
    """One sentence: what unity clips, and whether its interval of KL and the best other one overlap."""
    by_name = {one.name: one for one in rows}
    unity = by_name.pop("unity", None)
    if unity is None or not by_name:
        return ""
    clipped = [
        f"{100 * share:.2g} % of {what}"
        for what, share in (("K", unity.keys_clipped), ("V", unity.values_clipped))
        if share
    ]
    said = f"unity clips {' and '.join(clipped) or 'nothing'} here"
    kl, name = unity.gap.kl, min(by_name, key=lambda name: by_name[name].gap.kl.estimate)
    best = by_name[name].gap.kl
    if kl.low > best.high:
        return f"{said} and costs {kl.estimate:.2g} nats, {name} scales {best.estimate:.2g}"
    if best.low > kl.high:
        return f"{said} and is nearer than stored scales: {kl.estimate:.2g} nats, {name} {best.estimate:.2g}"
    if clipped:
        much = f"its {kl.estimate:.2g} nats and the {best.estimate:.2g} of {name} scales"
        return f"{said}; {much} cannot be told apart on {kl.units} document{'s' * (kl.units != 1)}"
    return f"{said}, and the {'three' if len(rows) == 3 else 'two'} cannot be told apart on this text"


def _fresh(corpus: Corpus, rest: Corpus, first: Sequence[Piece], seen: Stats | None) -> bool | None:
    """Whether the text that measures is none that the scales were made from; None where nothing tells."""
    if first:
        return rest is not corpus
    same = seen is not None and corpus.sha256 in {text.sha256 for text in seen.texts}
    return False if same else None


def _rest(corpus: Corpus, pieces: Sequence[Piece]) -> Corpus:
    """The documents of which no piece ran; all of them where there is no other."""
    ran = {piece.document for piece in pieces}
    rest = tuple(document for i, document in enumerate(corpus.documents) if i not in ran)
    return Corpus(corpus.name, rest) if rest else corpus


def _watch(run: Running, pieces: Sequence[Piece], seen: Stats, progress: ProgressFactory) -> None:
    """Statistics in memory: those of keys and values are small."""
    states = [run.begin(torch.tensor(piece.ids)) for piece in pieces]
    shown = progress(run.depth * seen.tokens, "calibrating")
    for i in range(run.depth):
        layer = watch_layer(run, i, states, seen)
        seen.caches |= layer.caches
        seen.layer_of |= layer.layer_of
        shown.advance(seen.tokens)
    shown.done()


def _modes(scales: CacheScales, seen: Stats | None, stat: str) -> dict[str, tuple[str, KVScales | None]]:
    """The caches to measure: unity, and with statistics both kinds of scales, else the one that is given."""
    found: dict[str, tuple[str, KVScales | None]] = {"unity": ("fp8_e4m3", None)}
    if seen is None:
        mode = "fp8_head" if scales.kv == "fp8_head" else "fp8_e4m3"
        return found | {"computed" if mode == "fp8_e4m3" else "per head": (mode, kv_scales(scales))}
    found["computed"] = "fp8_e4m3", kv_scales(CacheScales.of(seen, stat, "fp8"))
    if stat == "amax":
        found["per head"] = "fp8_head", kv_scales(CacheScales.of(seen, stat, "fp8_head"))
    return found


def _measure(
    run: Running,
    pieces: Sequence[Piece],
    modes: dict[str, tuple[str, KVScales | None]],
    progress: ProgressFactory,
) -> tuple[Measured, ...]:
    caches = {name: CacheFactory(run.config, mode, scales) for name, (mode, scales) in modes.items()}
    lanes = [Lane("wide", run), *(Lane(name, run, cache) for name, cache in caches.items())]
    beside = {name: Beside() for name in caches}
    for piece, logits in zip(pieces, together(lanes, pieces, progress=progress), strict=True):
        targets = torch.tensor(piece.ids[1:])
        for name, found in zip(caches, logits[1:], strict=True):
            beside[name].add(piece.document, logits[0][:-1], found[:-1], targets)
    return tuple(
        Measured(name, beside[name].gap(), _clipped(cache, "k"), _clipped(cache, "v"))
        for name, cache in caches.items()
    )


def _clipped(cache: CacheFactory, which: str) -> float:
    sides = [getattr(seen, which) for seen in cache.seen.values()]
    return float(sum(side.clipped for side in sides) / max(sum(side.elements for side in sides), 1))


def _layers(scales: CacheScales, seen: Stats | None) -> tuple[dict[str, Any], ...]:
    """What was seen and chosen, layer by layer: amax, share beyond 448, and the scale or the largest of the heads'."""
    rows = []
    for path, both in scales.scales.items():
        row: dict[str, Any] = {"attention": path, "layer": scales.layer_of[path]}
        for which, scale in both.items():
            row[f"{which}_scale"] = [float(value) for value in scale]
            if seen is not None:
                counted = seen.caches[path][which]
                row[f"{which}_amax"] = counted.amax
                row[f"{which}_beyond_448"] = counted.beyond(448.0) / max(counted.elements, 1)
        rows.append(row)
    return tuple(rows)


def save_overlay(found: KVCalibration, out: str | Path) -> Path:
    """The scales as an overlay file. UsageError where it exists."""
    target = place(out)
    check_absent(target)
    write_overlay(found.scales, target, found.fingerprint)
    return Path(out)
