"""How far hidden states of two runs are apart behind every layer, and the first that are not finite.

    relative = sqrt( Σ |h_child - h_parent|² / Σ |h_parent|² ),   each token weighted 1 / |h_parent|²

A token whose hidden state is a thousand times the others' (the first of a text, in many models) would otherwise be the
only one that counts. Cosines are per token as well. Sums are float64; nothing of a layer's size is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import torch

from narrowcast.errors import IncomparableError
from narrowcast.runtime.walk import State
from narrowcast.studies.evaluation import LayerGap
from narrowcast.texts.documents import Piece


@dataclass
class _Sums:
    tokens: int = 0
    error: float = 0.0
    cosine: float = 0.0
    least: float = inf


@dataclass
class Drift:
    """Hidden states of the first two lanes, layer by layer; hang ``after`` into ``lanes.together``."""

    names: Sequence[str]
    pieces: Sequence[Piece]
    sums: dict[int, _Sums] = field(default_factory=dict)

    def after(self, layer: int, index: int, states: Sequence[State]) -> None:
        """Raises IncomparableError for the first hidden state of a model that is not finite."""
        sides = [state.hidden[0].float() for state in states[: len(self.names)]]
        for name, hidden in zip(self.names, sides, strict=True):
            self._check(name, layer, index, hidden)
        if len(sides) == 2:
            self._add(layer, sides[0], sides[1])

    def _check(self, name: str, layer: int, index: int, hidden: torch.Tensor) -> None:
        finite = torch.isfinite(hidden).all(dim=1)
        if not bool(finite.all()):
            token = int(torch.nonzero(~finite)[0])
            kind = "NaN" if bool(hidden[token].isnan().any()) else "infinity"
            piece = self.pieces[index]
            raise IncomparableError(
                f"invalid: the hidden states of the {name} are not finite from layer {layer} on",
                where=f"document {piece.name}, token {piece.start + token}", got=kind,
                remedy="`narrowcast trace` names the operation that made it; try --dtype float32",
            )  # fmt: skip

    def _add(self, layer: int, parent: torch.Tensor, child: torch.Tensor) -> None:
        sums = self.sums.setdefault(layer, _Sums())
        sums.tokens += len(parent)
        sums.error += float(relative_squares(parent, child).sum())
        if torch.equal(parent, child):
            cosine = torch.ones(len(parent), dtype=torch.float64)
        else:
            cosine = torch.nn.functional.cosine_similarity(parent.double(), child.double(), dim=1)
        sums.cosine += float(cosine.sum())
        sums.least = min(sums.least, float(cosine.min()))

    def layers(self) -> tuple[LayerGap, ...]:
        """One row for each layer, in order."""
        return tuple(
            LayerGap(layer, sums.cosine / sums.tokens, sums.least, sqrt(sums.error / sums.tokens))
            for layer, sums in sorted(self.sums.items())
        )


def relative_squares(wanted: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """|got - wanted|² / |wanted|² for each row, float64 [T]; zero where both are zero."""
    error = (got.double() - wanted.double()).square().sum(dim=1)
    size = wanted.double().square().sum(dim=1)
    return torch.where(error > 0, error / size, torch.zeros_like(error))
