"""Two rows of logits reduced to a few numbers per token, a piece at a time; nothing of the vocabulary's size is kept.

    x_v = log q_v - log p_v        p the parent's next-token distribution, q the child's
    KL(p || q) = Σ_v p_v · (e^{x_v} - 1 - x_v)

which is -Σ p x because Σ p (e^x - 1) = Σ q - Σ p = 0, and has no negative term: rounding cannot make it less than
zero, equal logits give exactly zero, and a small divergence is not the difference of large sums. Log-softmax and terms
are float32, sums float64. Where e^x leaves float32 the row is done in float64 as Σ (q - p) - p x, the same thing.

Left out: the divergence in the other direction and the symmetric ones; the parent is the truth here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowcast.statistics.bootstrap import Interval, ratio_interval
from narrowcast.studies.evaluation import PERCENTILES, Gap, Histogram, Percentiles

CHUNK = 1 << 19  # logits that are reduced at once, so that temporaries stay in a cache
TOP = 5
LARGE = 60.0  # e^x of a difference of log-probabilities that float32 still multiplies exactly enough
BINS = np.logspace(-8, 2, 61)


def kl_rows(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL divergence float64 [T] in nats of log-probabilities float32 [T, V], see the module docstring."""
    x = q - p
    regular = (x.amax(dim=1) < LARGE) & torch.isfinite(x).all(dim=1)
    terms = torch.expm1(x).sub_(x).mul_(p.exp())
    found = terms.sum(dim=1, dtype=torch.float64)
    for row in torch.nonzero(~regular).flatten().tolist():
        found[row] = _kl_wide(p[row].double(), q[row].double())
    return found


def _kl_wide(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """One row in float64; what the parent gives no probability counts with what the child gives it."""
    weight = p.exp()
    terms = torch.where(weight > 0, q.exp() - weight - weight * (q - p), q.exp())
    return terms.sum()


def nll_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p of each target, float64 [T], from logits float32 [T, V]."""
    parts = [
        -torch.log_softmax(rows, dim=1).gather(1, ids[:, None])[:, 0].double()
        for rows, ids in _chunks(logits, targets)
    ]
    return torch.cat(parts)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    step = max(CHUNK // tensors[0].shape[1], 1)
    for start in range(0, len(tensors[0]), step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


@dataclass
class Likelihood:
    """Negative log-likelihood of one run by document."""

    documents: list[int] = field(default_factory=list)
    nll: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, document: int, nll: torch.Tensor) -> None:
        self.documents.append(document)
        self.nll.append(nll.numpy())

    def perplexity(self) -> Interval:
        """exp of the mean negative log-likelihood, with exp of its interval."""
        return exponent(_interval(self.documents, self.nll))


@dataclass(frozen=True)
class Worst:
    """A prediction with a large divergence: its piece and place, each side's best token and the probability of it,
    and the probabilities of the token that followed."""

    kl: float
    piece: int
    place: int
    parent: tuple[int, float]
    child: tuple[int, float]
    true: tuple[float, float]


@dataclass
class Beside:
    """One run beside another, a piece at a time: numbers per token, from which ``gap`` sums up, and the ``keep`` worst
    predictions."""

    keep: int = 0
    documents: list[int] = field(default_factory=list)
    kl: list[NDArray[np.float64]] = field(default_factory=list)
    nll: list[NDArray[np.float64]] = field(default_factory=list)  # the child's less the parent's
    shift: list[NDArray[np.float64]] = field(default_factory=list)
    top1: list[NDArray[np.float64]] = field(default_factory=list)
    top5: list[NDArray[np.float64]] = field(default_factory=list)
    identical: bool = True
    worst: list[Worst] = field(default_factory=list)

    def add(self, document: int, parent: torch.Tensor, child: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits float32 [T, V] of both, and the tokens [T] that followed."""
        rows = [_row(*part) for part in _chunks(parent, child, targets)]
        for name in ("kl", "nll", "shift", "top1", "top5"):
            getattr(self, name).append(np.concatenate([row[name] for row in rows]))
        self._keep_worst(parent, child, targets)
        self.documents.append(document)
        self.identical = self.identical and bool(torch.equal(parent, child))

    def _keep_worst(self, parent: torch.Tensor, child: torch.Tensor, targets: torch.Tensor) -> None:
        """Of neighbours, which one mistake makes bad together, only the first seen."""
        kl, piece, taken = self.kl[-1], len(self.documents), []
        for place in np.argsort(-kl, kind="stable")[: 4 * self.keep].tolist():
            if kl[place] > 0 and len(taken) < self.keep and all(abs(place - at) > 2 for at in taken):
                taken.append(place)
        for place in taken:
            p, q = (torch.softmax(side[place], dim=0) for side in (parent, child))
            best, followed = [int(side.argmax()) for side in (p, q)], int(targets[place])
            self.worst.append(
                Worst(
                    float(kl[place]), piece, place, (best[0], float(p[best[0]])),
                    (best[1], float(q[best[1]])), (float(p[followed]), float(q[followed])),
                )
            )  # fmt: skip
        self.worst = sorted(self.worst, key=lambda one: -one.kl)[: self.keep]

    def gap(self) -> Gap:
        """The whole text; ``worst`` is left to who knows the tokens."""
        kl, shift = np.concatenate(self.kl), np.concatenate(self.shift)
        change = exponent(self._mean("nll"))
        return Gap(
            identical=self.identical,
            perplexity=Interval(
                change.estimate - 1, change.low - 1, change.high - 1, change.units, change.method,
                change.confidence,
            ),
            kl=self._mean("kl").possible(0.0, inf),
            kl_percentiles=percentiles(kl),
            kl_histogram=histogram(kl),
            top1=self._mean("top1").possible(0.0, 1.0),
            top5=self._mean("top5").possible(0.0, 1.0),
            shift=self._mean("shift"),
            shift_rms=float(np.sqrt(np.mean(shift**2))),
            shift_percentiles=percentiles(shift, two_sided=True),
        )  # fmt: skip

    def _mean(self, name: str) -> Interval:
        return _interval(self.documents, getattr(self, name))


def _row(parent: torch.Tensor, child: torch.Tensor, targets: torch.Tensor) -> dict[str, NDArray[np.float64]]:
    p, q = torch.log_softmax(parent, dim=1), torch.log_softmax(child, dim=1)
    true = p.gather(1, targets[:, None])[:, 0].double(), q.gather(1, targets[:, None])[:, 0].double()
    best = parent.topk(TOP, dim=1).indices, child.topk(TOP, dim=1).indices
    shared = (best[0][:, :, None] == best[1][:, None, :]).any(dim=2).double().mean(dim=1)
    same = (parent.argmax(dim=1) == child.argmax(dim=1)).double()
    return {
        "kl": kl_rows(p, q).numpy(),
        "nll": (true[0] - true[1]).numpy(),
        "shift": (true[1].exp() - true[0].exp()).numpy(),
        "top1": same.numpy(),
        "top5": shared.numpy(),
    }


def _interval(documents: Sequence[int], parts: Sequence[NDArray[np.float64]]) -> Interval:
    """The mean over tokens of numbers that come piece by piece, its interval over documents."""
    order = {document: i for i, document in enumerate(dict.fromkeys(documents))}
    sums, counts = np.zeros(len(order)), np.zeros(len(order))
    for document, part in zip(documents, parts, strict=True):
        sums[order[document]] += part.sum()
        counts[order[document]] += len(part)
    return ratio_interval(sums, counts)


def exponent(mean: Interval) -> Interval:
    """exp of a mean of log-likelihoods and of its ends."""
    with np.errstate(over="ignore"):
        ends = [float(np.exp(end)) for end in (mean.estimate, mean.low, mean.high)]
    return Interval(ends[0], ends[1], ends[2], mean.units, mean.method, mean.confidence)


def percentiles(values: NDArray[Any], two_sided: bool = False) -> Percentiles:
    """Quantiles of one number per token; two-sided ones begin with the mirrored tails."""
    at = (*(100 - p for p in reversed(PERCENTILES[1:])), *PERCENTILES) if two_sided else PERCENTILES
    found = np.percentile(values, at)
    pairs = tuple((round(p, 3), float(value)) for p, value in zip(at, found, strict=True))
    return Percentiles(pairs, float(values.min()), float(values.max()))


def histogram(values: NDArray[Any]) -> Histogram:
    """Counts over logarithmic bins; what lies below the first counts in it."""
    positive = values[values > 0]
    counts, _ = np.histogram(np.clip(positive, BINS[0], BINS[-1]), BINS)
    return Histogram(tuple(BINS.tolist()), tuple(counts.tolist()), int((values <= 0).sum()))
