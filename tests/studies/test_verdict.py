"""Verdicts from answers: the five of them, what decides, and clusters, tasks and scores between 0 and 1."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import narrowcast
from narrowcast.errors import UsageError
from narrowcast.statistics.mcnemar import exact_p, score_interval
from narrowcast.statistics.power import detectable
from narrowcast.statistics.proportions import holm
from narrowcast.studies.verdict import Reading, verdict
from studies.answer_files import flips, pair, plain, write


def test_balanced_flips_of_gsm8k_show_no_difference(tmp_path: Path) -> None:
    found = verdict(*pair(tmp_path, 30, 28, 1319, 1000))
    assert found.reading is Reading.NO_DIFFERENCE
    assert found.reading.exit_code == 0
    assert found.whole is not None
    assert round(found.whole.p, 3) == 0.896
    assert (found.whole.lost, found.whole.gained, found.whole.questions) == (30, 28, 1319)
    assert found.whole.interval == score_interval(30, 28, 1319)


def test_the_same_flips_are_undecided_about_one_point(tmp_path: Path) -> None:
    found = verdict(*pair(tmp_path, 30, 28, 1319, 1000), effect=0.01)
    assert found.reading is Reading.UNDECIDED
    assert found.reading.exit_code == 4
    assert found.whole is not None
    assert found.whole.needed is not None
    assert found.whole.needed > 1319


def test_lopsided_flips_are_worse_and_the_other_way_better(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 60, 20, 1319, 1000)
    worse, better = verdict(a, b), verdict(b, a)
    assert (worse.reading, worse.reading.exit_code) == (Reading.WORSE, 1)
    assert (better.reading, better.reading.exit_code) == (Reading.BETTER, 0)
    assert worse.whole is not None
    assert better.whole is not None
    assert f"{worse.whole.p:.1e}" == "8.6e-06"
    assert better.whole.difference == -worse.whole.difference == 40 / 1319


def test_two_points_of_a_hundred_questions_are_undecided(tmp_path: Path) -> None:
    """The design's case: 80 against 78 of 100; unpaired, a difference of some 11 points would show."""
    found = verdict(*pair(tmp_path, 5, 3, 100, 75))
    assert found.reading is Reading.UNDECIDED
    assert found.whole is not None
    assert (found.whole.a, found.whole.b) == (0.8, 0.78)
    assert 0.11 < found.whole.unpaired < 0.115


def test_one_model_twice_differs_by_exactly_nothing(tmp_path: Path) -> None:
    a, _ = pair(tmp_path, 5, 3, 10)
    found = verdict(a, a)
    assert found.reading is Reading.NO_DIFFERENCE
    assert found.same
    assert found.whole is not None
    interval = found.whole.interval
    assert (interval.estimate, interval.low, interval.high, found.whole.p) == (0, 0, 0, 1)


def test_ten_equal_scores_of_two_models_do_not_show_that_they_are_equal(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 0, 0, 10, 5)
    found = verdict(a, b)
    assert found.reading is Reading.UNDECIDED
    assert found.whole is not None
    assert (
        found.whole.bootstrap.high == 0 < 0.25 < found.whole.interval.high
    )  # a bootstrap would have said: equal


def test_equal_responses_do(tmp_path: Path) -> None:
    scores, replies = [1, 0, 1], ["x", "y", "z"]
    a = write(tmp_path / "a.jsonl", plain(scores, response=replies))
    b = write(tmp_path / "b.jsonl", plain(scores, response=replies))
    assert verdict(a, b).same
    write(b, plain(scores, response=["x", "y", "other"]))
    assert not verdict(a, b).same


def test_significant_but_small_is_worse(tmp_path: Path) -> None:
    found = verdict(*pair(tmp_path, 140, 70, 14042))
    assert found.reading is Reading.WORSE
    assert found.whole is not None
    assert found.whole.interval.within(found.effect)


@pytest.mark.parametrize("n", [4, 7])
def test_every_outcome_of_few_questions(tmp_path: Path, n: int) -> None:
    """Among equal models, over all outcomes with their probability, worse is said in at most 2.5 %."""
    wrongly = 0.0
    for lost in range(n + 1):
        gained = n - lost
        found = verdict(*pair(tmp_path, lost, gained, n))
        assert (found.reading is Reading.WORSE) == (exact_p(lost, gained) <= 0.05 and lost > gained)
        wrongly += comb(n, lost) / 2**n * (found.reading is Reading.WORSE)
    assert wrongly <= 0.025


def test_clusters_widen(tmp_path: Path) -> None:
    """40 passages of 10 questions that flip together are 40 things, not 400."""
    change = np.repeat([-1, 1, 0, 0], (6, 2, 16, 16)).repeat(10)
    a, b = np.where(change < 0, 1, 0), np.where(change > 0, 1, 0)
    passages = [f"p{i // 10}" for i in range(400)]
    files = [
        write(tmp_path / f"{x}.jsonl", plain(s.tolist(), passage=passages)) for x, s in (("a", a), ("b", b))
    ]
    alone, together = verdict(*files), verdict(*files, cluster="passage")
    assert alone.reading is Reading.WORSE
    assert together.reading is Reading.UNDECIDED
    row = together.whole
    assert row is not None
    assert row.clusters == 40
    assert row.p == pytest.approx(exact_p(6, 2))  # ten flips of a passage are one flip of ten
    assert row.mid_p is None
    assert alone.whole is not None
    assert row.interval.high - row.interval.low > 2 * (alone.whole.interval.high - alone.whole.interval.low)
    variance = (40 / 39 * 10) / (
        400 / 399
    )  # of the mean of 40 sums of ten equal ones, to that of 400 questions
    assert row.detectable == pytest.approx(detectable(400, 0.2, design=variance))
    assert alone.whole.detectable == detectable(400, 0.2)
    renamed = [write(f, [r | {"document": r["passage"]} for r in map(json.loads, f.open())]) for f in files]
    assert verdict(*renamed).whole == row  # a document is a cluster without being asked for


def test_scores_between_zero_and_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.uniform(0.2, 1, 14)
    b = a - rng.uniform(0, 0.2, 14)
    found = verdict(
        write(tmp_path / "a.jsonl", plain(a.tolist())), write(tmp_path / "b.jsonl", plain(b.tolist()))
    )
    assert found.reading is Reading.WORSE
    row = found.whole
    assert row is not None
    theirs = stats.permutation_test(
        (b - a,), lambda x, axis: x.sum(axis), permutation_type="samples", vectorized=True, n_resamples=np.inf
    )
    assert row.p == pytest.approx(theirs.pvalue)
    assert not row.binary
    assert row.interval == row.bootstrap
    assert row.difference == pytest.approx((b - a).mean())


def tasks(folder: Path, counts: dict[str, tuple[int, int, int]]) -> tuple[Path, Path]:
    for name, (lost, gained, n) in counts.items():
        for side, scores in zip("ab", flips(lost, gained, n, (n - lost - gained) // 2), strict=True):
            write(folder / side / f"samples_{name}_2026-11-30T04-00-00.123456.jsonl", plain(scores))
    return folder / "a", folder / "b"


def test_tasks_are_many_comparisons(tmp_path: Path) -> None:
    """One of eight tasks with p = 0.04 is what chance does; the whole is judged by itself."""
    counts = {f"t{i}": (5, 5, 300) for i in range(7)} | {"odd": (12, 3, 300)}
    found = verdict(*tasks(tmp_path, counts))
    assert found.reading is Reading.NO_DIFFERENCE
    assert [row.task for row in found.tasks] == sorted(counts)
    odd = next(row for row in found.tasks if row.task == "odd")
    assert odd.p <= 0.05 < (odd.adjusted_p or 0)
    assert [row.adjusted_p for row in found.tasks] == holm([row.p for row in found.tasks])
    assert found.whole is not None
    assert (found.whole.lost, found.whole.gained, found.whole.questions) == (47, 38, 2400)


def test_one_broken_task_is_worse_whatever_the_whole_says(tmp_path: Path) -> None:
    found = verdict(*tasks(tmp_path, {"broken": (40, 4, 300), "fine": (5, 38, 300), "same": (9, 9, 300)}))
    assert found.whole is not None
    assert found.whole.p > 0.5
    assert found.reading is Reading.WORSE
    assert [row.task for row in found.worse_tasks] == ["broken"]


def test_confidence_moves_both_the_interval_and_the_level(tmp_path: Path) -> None:
    files = pair(tmp_path, 14, 4, 400, 300)
    assert verdict(*files).reading is Reading.WORSE
    strict = verdict(*files, confidence=0.99)
    assert strict.reading is Reading.UNDECIDED
    assert strict.whole is not None
    assert strict.whole.interval == score_interval(14, 4, 400, 0.99)


def test_one_question_and_one_cluster(tmp_path: Path) -> None:
    assert verdict(*pair(tmp_path, 1, 0, 1)).reading is Reading.UNDECIDED
    found = verdict(*pair(tmp_path, 30, 0, 100), cluster="task")
    assert found.reading is Reading.UNDECIDED
    assert found.whole is not None
    assert (found.whole.bootstrap.low, found.whole.bootstrap.high) == (-1, 1)


def test_refuses_what_cannot_be_asked(tmp_path: Path) -> None:
    files = pair(tmp_path, 1, 1, 10)
    for options in ({"effect": 0.0}, {"effect": 2.0}, {"confidence": 1.0}, {"metric": "bleu"}, {"cluster": "author"},
                    {"filter": "strict"}, {"k": 5}):  # fmt: skip
        with pytest.raises(UsageError):
            verdict(*files, **options)  # type: ignore[arg-type]


def test_from_the_package(tmp_path: Path) -> None:
    assert narrowcast.verdict(*pair(tmp_path, 60, 20, 1319)).reading == "worse"
