"""An evaluation with every part, made up: pages are tested without running models."""

from __future__ import annotations

from math import inf

from narrowcast.statistics.bootstrap import Interval
from narrowcast.studies.evaluation import (
    CacheRow,
    Continuation,
    Divergence,
    Evaluation,
    Fault,
    Gap,
    Greedy,
    Histogram,
    LayerGap,
    Part,
    Percentiles,
    Retrieval,
    RetrievalCell,
    Side,
    Structured,
    Text,
    WorstToken,
)

NASTY = "<script>alert('x')</script>\x1b[31m\u202egnp.\u2066\x00 & \"q\" </style>\n\t"
JUMP = 4


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, 20, "bootstrap")


def alone(estimate: float) -> Interval:
    """What one document gives."""
    return Interval(estimate, -inf, inf, 1, "none")


def gap(kl: float = 0.0314, worst: int = 3) -> Gap:
    """``worst`` predictions are of tokens that mean harm."""
    edges = tuple(10.0 ** (e / 2) for e in range(-8, 3))
    up = ((0.1, -0.61), (1.0, -0.32), (10.0, -0.05), (50.0, 0.001), (90.0, 0.041), (99.0, 0.25), (99.9, 0.52))
    return Gap(
        identical=False,
        perplexity=interval(0.0517, 0.0311, 0.0742),
        kl=interval(kl, kl / 1.25, kl * 1.25),
        kl_percentiles=Percentiles(((50.0, 0.0131), (90.0, 0.072), (99.0, 0.41), (99.9, 1.73)), 1e-6, 2.612),
        kl_histogram=Histogram(edges, (3, 10, 60, 200, 260, 210, 90, 30, 6, 1), 7),
        top1=interval(0.9123, 0.9011, 0.9234),
        top5=interval(0.8876, 0.8791, 0.8962),
        shift=interval(-0.0132, -0.0189, -0.0074),
        shift_rms=0.0641,
        shift_percentiles=Percentiles(up, -0.83, 0.64),
        worst=tuple(
            WorstToken(
                f"doc {NASTY}", 1234 + i, f"so it {NASTY}", NASTY, 2.612 - i, (NASTY, 0.97), ("", 0.6), 0.97, 3e-9
            )
            for i in range(worst)
        ),
    )  # fmt: skip


def divergence(layers: int = 8) -> Divergence:
    rows = [
        LayerGap(
            i, 1 - 1e-4 * (i + 1), 1 - 2e-3 * (i + 1), 0.01 * (i + 1) * (8 if i >= JUMP else 1),
            0.9 if i == JUMP else 0.031, 0.032,
        )
        for i in range(layers)
    ]  # fmt: skip
    part = Part("mlp.down_proj", 1.01, 0.03)
    fault = Fault(
        f"layer {JUMP}, mlp.down_proj", 0.9, 0.032, part, f"values differ {NASTY}", "look for a <scale>"
    )
    return Divergence(tuple(rows), (fault,), (f"config.json: {NASTY}",))


def everything() -> Evaluation:
    caches = (
        CacheRow("fp8_e4m3, unity", 11520, 0.0013, interval(17.1, 15, 19), gap(0.0021, 0), gap(0.0333, 0)),
        CacheRow("int4_per_token_head", 6480, 0.0, interval(18.9, 17, 21), gap(0.0913, 0), gap(0.1234, 0)),
        CacheRow("nvfp4", 6479, 0.0),
    )
    rows = (
        Continuation("one", f"Begin {NASTY}", "the same words", "the same words", None, None),
        Continuation("two", "Begin", f"a common road {NASTY}", "a common end", 3, 0.0625),
    )
    cells = tuple(
        RetrievalCell(length, depth, 4, 4, 4 if depth < 0.9 else 2) for length in (256, 512) for depth in (0.1, 0.9)
    )  # fmt: skip
    return Evaluation(
        text=Text(f"text {NASTY}", "5eed" * 16, 20, 40, 2480, 64, ((7, NASTY), (8, " b")), "both models' own"),
        child=Side(f"models/child {NASTY}", "compressed-tensors", "bfloat16", interval(16.83, 14.2, 19.9)),
        parent=Side("models/parent", "plain", "bfloat16", interval(16.01, 13.5, 18.9)),
        gap=gap(), caches=caches, divergence=divergence(), greedy=Greedy(32, 32, 1, rows, 3.0),
        retrieval=Retrieval(4, cells, "parent 16, child 12 of 16; 25% would be luck"),
        structured=Structured(8, 7, 6, 5, 3, "valid: parent 5, child 3 of 8", f'{{"name": 1}}\n{NASTY}'),
        notes=(f"a note {NASTY}",), seconds=61.0,
    )  # fmt: skip
