"""How far a quantized model is from its parent, over one text that both read once, teacher-forced.

    evaluate(child, against) → Evaluation

Both models walk through the text side by side, layer by layer; each piece's logits are reduced when they come and let
go. The child runs under quantized KV caches in the same pass, as further lanes that share its weights. Then come what
needs whole models in memory: greedy continuations, retrieval, structured output.

Both run in one dtype, the child's own where nothing else is asked, so that the gap is the quantization's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from time import monotonic
from typing import Any

import torch
from torch import nn

from narrowcast.errors import CheckpointError, IncomparableError
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.runtime.caches import CacheFactory
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.linear import ScaledLinear, Seen
from narrowcast.runtime.walk import Running
from narrowcast.studies.accumulation import check_name, sampled
from narrowcast.studies.continuations import continued
from narrowcast.studies.divergence import Drift
from narrowcast.studies.evaluation import (
    Asked,
    CacheRow,
    Clipped,
    Evaluation,
    Gap,
    Side,
    Text,
    WorstToken,
)
from narrowcast.studies.faults import divergence
from narrowcast.studies.kv_lanes import OF_E4M3, CacheLane, cache_lanes
from narrowcast.studies.local import Local
from narrowcast.studies.measure import Beside, Likelihood, Worst, nll_rows
from narrowcast.studies.retrieval import retrieval
from narrowcast.studies.structured import read_schema, structured
from narrowcast.studies.tokens import Tokens, shared
from narrowcast.texts.documents import Corpus, read

TOKENS, CONTEXT, PROMPTS, WORST = 2048, 128, 8, 5
CACHE_MODES = {name: mode for mode, name in OF_E4M3.items()}
BEFORE = 24  # tokens of context that are shown with a bad prediction


@dataclass(frozen=True)
class Options:
    """What is measured, and over how much text."""

    tokens: int | None = TOKENS
    context: int = CONTEXT
    caches: Sequence[str] = ()
    scales: str | Path | None = None
    attention: str | None = None
    greedy: int = PROMPTS
    retrieval: bool = False
    schema: str | Path | None = None
    stream: bool = False
    accumulate: str | None = None
    asked: Asked = field(default_factory=Asked)


@dataclass
class _Lanes:
    """What is gathered while the logits come: of each side, of the child beside the parent, of each cache."""

    runs: dict[str, Running]
    caches: Mapping[str, CacheFactory]  # by the name of the lane
    likelihood: dict[str, Likelihood] = field(default_factory=dict)
    beside: dict[tuple[str, str], Beside] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def add(self, document: int, logits: dict[str, torch.Tensor], targets: torch.Tensor) -> None:
        for name, rows in logits.items():
            if bool(rows.isnan().any()):
                self._refuse(name)
                continue
            self.likelihood.setdefault(name, Likelihood()).add(document, nll_rows(rows, targets))
        for first, second in self._pairs(logits):
            if not {first, second} & self.broken:
                known = self.beside.setdefault((first, second), Beside(WORST if second == "child" else 0))
                known.add(document, logits[first], logits[second], targets)

    def _pairs(self, logits: dict[str, Any]) -> list[tuple[str, str]]:
        pairs = [("parent", name) for name in logits if name != "parent" and "parent" in logits]
        return pairs + [("child", mode) for mode in self.caches]

    def _refuse(self, name: str) -> None:
        if name in self.runs:
            raise IncomparableError(
                f"invalid: the {name}'s logits are NaN although its hidden states are finite",
                where=self.runs[name].root, remedy="look at its final norm and its head",
            )  # fmt: skip
        self.broken.add(name)


def evaluate(
    child: str | Path,
    against: str | Path | None = None,
    *,
    online: str | None = None,
    text: Sequence[str] = (),
    dtype: str | None = None,
    options: Options | None = None,
    progress: ProgressFactory = Silent,
) -> Evaluation:
    """Evaluate ``child`` beside its parent ``against``; with ``online``, an engine's online scheme, the parent is by
    default the same model without it.

    Raises UsageError and InputError for what cannot be opened or run, IncomparableError for different token ids and
    for NaN.
    """
    start, options = monotonic(), options or Options()
    if options.accumulate is not None:
        check_name(options.accumulate)
    corpus = read(text)
    if options.schema is not None:
        read_schema(options.schema)  # before the work, not after it
    with ExitStack() as stack:
        runs = _open(stack, child, against, online, dtype)
        tokens = shared(runs["child"], runs.get("parent"), corpus, options.context, options.tokens)
        again = partial(Running.open, child, dtype, online)
        more = cache_lanes(runs["child"], options.caches, options.scales, options.attention, again, stack)
        walked = _walk(runs, more, tokens, options, progress)
        lanes, gap = walked.lanes, _gap(walked.lanes, tokens) if "parent" in runs else None
        found = Evaluation(
            text=_text(corpus, tokens, options.context),
            child=_side(runs["child"], child, lanes.likelihood["child"], online),
            parent=_side(runs["parent"], against or child, lanes.likelihood["parent"]) if "parent" in runs else None,
            gap=gap,
            caches=_caches(lanes),
            divergence=divergence(walked.drift.layers(), walked.local, gap) if gap is not None else None,
            sums=tuple(sampled(runs["child"], tokens.pieces[0].ids, options.accumulate)) if options.accumulate else (),
            clipped=walked.clipped(),
            asked=options.asked,
            notes=(*walked.notes, *_notes(runs, options)),
            **_written(runs, tokens, options, progress),
        )  # fmt: skip
    return replace(found, seconds=monotonic() - start)


def _open(
    stack: ExitStack, child: str | Path, against: str | Path | None, online: str | None, dtype: str | None
) -> dict[str, Running]:
    """The models by name, parent first; one Running for both where they are the same."""
    run = stack.enter_context(Running.open(child, dtype, online))
    parent = against if against is not None else child if online else None
    if parent is None:
        return {"child": run}
    if online is None and Path(parent).resolve() == Path(child).resolve():
        return {"parent": run, "child": run}
    other = stack.enter_context(Running.open(parent, str(run.dtype).removeprefix("torch.")))
    sizes = [(one.depth, int(one.config.hidden_size)) for one in (run, other)]
    if sizes[0] != sizes[1]:
        got, wanted = (f"{depth} layers, hidden states of {width}" for depth, width in sizes)
        raise IncomparableError(
            "these models are not of one architecture", where=child, got=got, wanted=f"{wanted}, as the parent",
            remedy="name the model that this one was made from",
        )  # fmt: skip
    return {"parent": other, "child": run}


@dataclass
class _Walked:
    """What one pass gathered."""

    lanes: _Lanes
    drift: Drift
    local: Local | None
    notes: list[str] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)  # by linears with a stored input scale

    def clipped(self) -> tuple[Clipped, ...]:
        """Linears whose stored input scale was too small, worst first."""
        shares = [
            Clipped(name, seen.clipped / seen.elements) for name, seen in self.seen.items() if seen.clipped
        ]
        return tuple(sorted(shares, key=lambda one: -one.share))


def _walk(
    runs: dict[str, Running],
    more: Sequence[CacheLane],
    tokens: Tokens,
    options: Options,
    progress: ProgressFactory,
) -> _Walked:
    lanes = [*(Lane(name, run) for name, run in runs.items()), *(one.lane for one in more)]
    caches = {one.name: one.cache for one in more}
    two = "parent" in runs and runs["parent"] is not runs["child"]
    found = _Walked(
        _Lanes(runs, caches), Drift(tuple(runs), tokens.pieces),
        Local(runs["parent"], runs["child"], tokens.pieces) if two else None,
    )  # fmt: skip

    def prepare(i: int, run: Running, layer: nn.Module) -> None:
        if run is runs["child"]:
            linears = [one for one in layer.modules() if isinstance(one, ScaledLinear)]
            stored = [one for one in linears if one.inputs is not None and one.inputs.static is not None]
            found.seen.update({one.name: one.seen for one in stored})
        if found.local is not None:
            found.local.prepare(i, run, layer)

    walked = together(
        lanes, tokens.pieces, prepare=prepare, after=found.drift.after, progress=progress,
        spool=gettempdir() if options.stream else None, told=found.notes.append,
    )  # fmt: skip
    for piece, logits in zip(tokens.pieces, walked, strict=True):
        named = {lane.name: rows[:-1] for lane, rows in zip(lanes, logits, strict=True)}
        found.lanes.add(piece.document, named, torch.tensor(piece.ids[1:]))
    return found


def _written(
    runs: dict[str, Running], tokens: Tokens, options: Options, progress: ProgressFactory
) -> dict[str, Any]:
    """What needs whole models in memory, one at a time."""
    found: dict[str, Any] = {}
    same = "parent" not in runs or runs["parent"] is runs["child"]
    if options.greedy and not same:
        found["greedy"] = continued(list(runs.values()), tokens, options.greedy)
    if options.retrieval:
        found["retrieval"] = retrieval(runs, tokens)
    if options.schema is not None:
        found["structured"] = structured(runs, tokens, options.schema)
    return found


def _side(run: Running, path: str | Path, likelihood: Likelihood, online: str | None = None) -> Side:
    dtype = str(run.dtype).removeprefix("torch.")
    return Side(str(path), run.opened.contents.container, dtype, likelihood.perplexity(), online)


def _text(corpus: Corpus, tokens: Tokens, context: int) -> Text:
    pieces = tokens.pieces
    return Text(
        corpus.name, corpus.sha256, len({piece.document for piece in pieces}), len(pieces),
        sum(len(piece.ids) - 1 for piece in pieces), context, tokens.first, tokens.note,
    )  # fmt: skip


def _gap(lanes: _Lanes, tokens: Tokens) -> Gap:
    beside = lanes.beside["parent", "child"]
    return replace(beside.gap(), worst=tuple(_worst(one, tokens) for one in beside.worst))


def _worst(one: Worst, tokens: Tokens) -> WorstToken:
    piece = tokens.pieces[one.piece]
    ids, end = piece.ids, one.place + 1
    return WorstToken(
        piece.name, piece.start + end, tokens.text(ids[max(end - BEFORE, 0) : end]), tokens.text([ids[end]]), one.kl,
        (tokens.text([one.parent[0]]), one.parent[1]), (tokens.text([one.child[0]]), one.child[1]), *one.true,
    )  # fmt: skip


def _caches(lanes: _Lanes) -> tuple[CacheRow, ...]:
    rows = []
    for mode, cache in lanes.caches.items():
        seen = [side for layer in cache.seen.values() for side in (layer.k, layer.v)]
        clipped = sum(side.clipped for side in seen) / max(sum(side.elements for side in seen), 1)
        facts = mode, cache.bytes_per_token, clipped
        if mode in lanes.broken:
            rows.append(CacheRow(*facts))
            continue
        gap = lanes.beside.get(("parent", mode))
        rows.append(
            CacheRow(
                *facts, lanes.likelihood[mode].perplexity(), lanes.beside["child", mode].gap(),
                gap.gap() if gap is not None else None,
            )
        )  # fmt: skip
    return tuple(rows)


def _notes(runs: dict[str, Running], options: Options) -> list[str]:
    from narrowcast.runtime.walk import said_dtype

    two = "parent" in runs and runs["parent"] is not runs["child"]
    found = [f"{name}: {note}" for name, run in runs.items() if two or name == "child" for note in run.notes]
    if two:
        found += _stops(runs["parent"], runs["child"])
    if "parent" in runs:
        own = said_dtype(runs["parent"].opened.checkpoint.config or {})
        ran = str(runs["child"].dtype).removeprefix("torch.")
        if own != ran:
            found.append(f"the parent's own dtype is {own}; both ran in {ran}")
    else:
        found.append(
            "a perplexity compares only with others of the same text, tokenizer and context; --against PARENT says "
            "what quantization changed"
        )
    kv = runs["child"].opened.contents.kv
    if kv is not None:
        more = "" if options.caches else f"; --kv {CACHE_MODES.get(kv, kv)} runs that as well"
        found.append(f"the checkpoint asks for an {kv} KV cache, and the child ran with a wide one{more}")
    return found


def _stops(parent: Running, child: Running) -> list[str]:
    """What ends a text, where the two do not agree: predictions are the same, and a server goes on or stops early."""
    config = child.config.eos_token_id, parent.config.eos_token_id
    try:
        stops = child.stops, parent.stops
    except CheckpointError as error:
        return [str(error).split("\n")[0]]
    pairs = [("config.json", config), *([("generation_config.json", stops)] if stops != config else [])]
    return [
        f"{where}: eos_token_id is {mine}, the parent's {theirs}; texts end elsewhere"
        for where, (mine, theirs) in pairs
        if mine != theirs
    ]
