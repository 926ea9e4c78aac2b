"""Greedy continuations of the beginnings of documents, by both models: do they write the same, and if not, from where?

    first     the first token that differs; from there on the two texts are different texts
    margin    log p(best) - log p(second) of the parent there: a small one was a coin toss before quantization

Prompts have one length, so that they run as one batch without padding, and both models in the same way.

Left out: sampling, whose differences a single run cannot tell from luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from narrowcast.runtime.walk import Running
from narrowcast.studies.evaluation import Continuation, Greedy
from narrowcast.studies.tokens import Tokens
from narrowcast.texts.documents import Piece

PROMPT, WRITTEN = 32, 32  # tokens


def prompts(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The beginnings of ``count`` documents that are long enough."""
    return [piece for piece in pieces if piece.start == 0 and len(piece.ids) >= PROMPT][:count]


@torch.inference_mode()
def write(model: Any, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` best next tokens after ids [N, T]: tokens int64 [N, count], and the margin of each, float32."""
    cache, given, tokens, margins = None, ids, [], []
    for _ in range(count):
        out = model(input_ids=given, cache=cache, use_cache=True, logits_to_keep=1)
        cache = out.cache
        logits = out.logits[:, -1].float()
        best = logits.topk(2, dim=1).values
        given = logits.argmax(dim=1, keepdim=True)
        tokens.append(given)
        margins.append(best[:, 0] - best[:, 1])
    return torch.cat(tokens, dim=1), torch.stack(margins, dim=1)


def continued(models: Sequence[Running], tokens: Tokens, count: int) -> Greedy | None:
    """Continuations of ``count`` prompts by parent and child, one model in memory at a time; None without prompts."""
    chosen = prompts(tokens.pieces, count)
    if not chosen:
        return None
    ids = torch.tensor([piece.ids[:PROMPT] for piece in chosen])
    written = []
    for run in models:
        model = run.resident()
        written.append(write(model, ids, WRITTEN))
        del model
    (parent, margins), (child, _) = written
    ends = end_tokens(models[0])
    rows = [
        _row(piece, parent[i].tolist(), child[i].tolist(), margins[i].tolist(), tokens, ends)
        for i, piece in enumerate(chosen)
    ]
    firsts = [row.first for row in rows if row.first is not None]
    return Greedy(
        WRITTEN, PROMPT, sum(row.first is None for row in rows), tuple(rows),
        float(np.median(firsts)) if firsts else None,
    )  # fmt: skip


def end_tokens(run: Running) -> set[int]:
    """Ids that end a text."""
    said = getattr(run.config, "eos_token_id", None)
    return set(said if isinstance(said, list) else [] if said is None else [said])


def _row(
    piece: Piece, parent: list[int], child: list[int], margins: list[float], tokens: Tokens, ends: set[int]
) -> Continuation:
    """One prompt; what the parent writes behind the end of its text does not count."""
    stop = next((i + 1 for i, token in enumerate(parent) if token in ends), len(parent))
    first = next((i for i in range(stop) if parent[i] != child[i]), None)
    return Continuation(
        piece.name, tokens.text(piece.ids[:PROMPT]), tokens.text(parent[:stop]), tokens.text(child[:stop]), first,
        None if first is None else margins[first],
    )  # fmt: skip
