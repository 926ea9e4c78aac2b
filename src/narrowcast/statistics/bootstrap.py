"""Intervals for a share over documents: resample documents, not tokens, for the tokens of a document agree.

    r = Σ sums / Σ counts          over the documents (or clusters of questions) that were seen

From ``FEW`` documents on the interval is the bootstrap's percentile interval, its tails moved out as small samples
need it: the bootstrap's spread is short by √((n-1)/n) and the normal's tail is lighter than Student's t, so the tail
is α' = Φ(-√(n/(n-1)) · t(α/2, n-1)) instead of α/2 (the expanded percentile interval, Hesterberg 2015, section 4.1.1,
arXiv 1411.5279). Below ``FEW`` no resample can reach beyond the documents that were seen, and the interval is

    r ± t(α/2, n-1) · se,    se² = n/(n-1) · Σ (sum - r · count)² / (Σ counts)²

the t interval of the linearised ratio (cluster-robust with CR1's factor). With one document nothing is known of the
others: the interval is the whole line.

Left out: the bias-corrected accelerated interval. Simulated here, ratios over 10 to 50 documents: it covers one
point more of strongly skewed documents (lognormal, σ = 1) and one less of normal ones. No interval can repair what
few skewed documents leave unseen: 10 such documents give 84 % where 95 % was asked, 50 give 90 %; at σ = 0.5 it is
91 and 93 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from narrowcast.errors import UsageError
from narrowcast.statistics.quantiles import NORMAL, t_quantile

FEW = 10
Method = Literal["bootstrap", "t", "none", "score", "mixture", "identical"]
_Doubles = NDArray[np.float64]
_DRAWS = 1 << 22  # numbers drawn at once: a bound on memory


@dataclass(frozen=True)
class Interval:
    """An estimate with the interval that holds the truth at ``confidence``, and how it was found.

    ``units`` is the number of independent units behind it: documents, clusters or questions.
    """

    estimate: float
    low: float
    high: float
    units: int
    method: Method
    confidence: float = 0.95

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies between -``margin`` and ``margin``."""
        return -margin <= self.low and self.high <= margin

    def possible(self, low: float, high: float) -> Interval:
        """The part between the values that the estimate can have at all, which holds the truth as often. An interval
        that knows nothing stays the whole line."""
        if self.method == "none":
            return self
        return replace(self, low=max(low, self.low), high=min(high, self.high))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; an unbounded end is infinite."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "units": self.units,
            "method": self.method,
        }


def ratio_interval(
    sums: ArrayLike, counts: ArrayLike, confidence: float = 0.95, resamples: int = 10000, seed: int = 0
) -> Interval:
    """Σ ``sums`` / Σ ``counts`` with its interval; one entry of each per document.

    A paired difference is the ratio of the differences of the sums. The same input gives the same interval. Raises
    UsageError for no documents, lengths that differ, counts that are negative or add up to zero, and NaN or
    infinity in either.
    """
    s, c = _checked(sums, counts)
    n, total = len(s), float(c.sum())
    estimate = float(s.sum()) / total
    if n == 1:
        return Interval(estimate, -inf, inf, 1, "none", confidence)
    if n < FEW:
        half = t_quantile((1 + confidence) / 2, n - 1) * standard_error(s, c)
        return Interval(estimate, estimate - half, estimate + half, n, "t", confidence)
    drawn = _totals(np.stack((s, c), axis=1), resamples, seed)
    ratios = drawn[drawn[:, 1] > 0]  # a resample of documents that count nothing says nothing
    low, high = _expanded(ratios[:, 0] / ratios[:, 1], n, confidence)
    return Interval(estimate, low, high, n, "bootstrap", confidence)


def standard_error(sums: ArrayLike, counts: ArrayLike) -> float:
    """Standard error of Σ sums / Σ counts over documents or clusters, linearised: √(n/(n-1) Σ(s - r c)²) / Σ c.

    With one question per cluster and counts of one it is the usual √(Σ(s - mean)² / (n(n-1))); clusters give
    Miller's clustered standard error (arXiv 2411.00640) with the small-sample factor. Infinite for one document.
    """
    s, c = _checked(sums, counts)
    if len(s) == 1:
        return inf
    residual = s - c * (float(s.sum()) / float(c.sum()))
    return sqrt(len(s) / (len(s) - 1) * float(residual @ residual)) / float(c.sum())


def by_cluster(values: ArrayLike, clusters: NDArray[np.integer]) -> tuple[_Doubles, _Doubles]:
    """Sums and counts per cluster of ``values``, one value per question; clusters are numbered from 0."""
    sums = np.bincount(clusters, np.asarray(values, np.float64))
    return sums.astype(np.float64), np.bincount(clusters).astype(np.float64)


def _checked(sums: ArrayLike, counts: ArrayLike) -> tuple[_Doubles, _Doubles]:
    s, c = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if s.ndim != 1 or s.shape != c.shape or not s.size:
        raise UsageError(
            "an interval needs one sum and one count per document",
            got=f"{list(s.shape)} and {list(c.shape)}",
        )
    if not (np.isfinite(s).all() and np.isfinite(c).all()):
        bad = int(np.flatnonzero(~np.isfinite(s) | ~np.isfinite(c))[0])
        raise UsageError("a document's sum or count is not finite", where=f"document {bad}")
    if (c < 0).any() or not c.sum():
        raise UsageError("counts are negative or all zero", got=f"a total of {c.sum():g}")
    return s, c


def _totals(rows: _Doubles, resamples: int, seed: int) -> _Doubles:
    """Column sums [resamples, columns] of as many rows drawn with replacement.

    Rows that are equal need not be told apart: how often each distinct row is drawn is multinomial, which makes
    thousands of questions of three outcomes three numbers.
    """
    rng, n = np.random.default_rng(seed), len(rows)
    distinct, times = np.unique(rows, axis=0, return_counts=True)
    if len(distinct) * 8 <= n:
        return rng.multinomial(n, times / n, resamples) @ distinct
    out, step = np.empty((resamples, rows.shape[1])), max(1, _DRAWS // n)
    for start in range(0, resamples, step):
        chosen = rng.integers(0, n, (min(step, resamples - start), n))
        for column in range(rows.shape[1]):
            out[start : start + step, column] = rows[:, column][chosen].sum(1)
    return out


def _expanded(values: _Doubles, n: int, confidence: float) -> tuple[float, float]:
    tail = NORMAL.cdf(-sqrt(n / (n - 1)) * t_quantile((1 + confidence) / 2, n - 1))
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)
