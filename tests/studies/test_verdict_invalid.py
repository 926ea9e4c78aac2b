"""What is not compared: each reason with its count, the first place and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowcast.studies.verdict import Reading, verdict
from narrowcast.studies.verdict_pairs import Refusal
from studies.answer_files import plain, write

N = 6
IDS = [[1, 10 + i, 20, 30] for i in range(N)]


def refusals(folder: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[Refusal, ...]:
    scores = [1.0, 0.0] * (N // 2)
    files = [
        write(folder / f"{side}.jsonl", plain(fields.pop("score", scores), **fields))
        for side, fields in (("a", dict(a)), ("b", dict(b)))
    ]
    found = verdict(*files)
    if found.refusals:
        assert found.reading is Reading.INVALID
        assert found.reading.exit_code == 4
        assert found.whole is None
        assert found.to_json()["whole"] is None
    return found.refusals


def only(found: tuple[Refusal, ...], reason: str) -> Refusal:
    assert [refusal.reason for refusal in found] == [reason]
    return found[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_log_probs_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    good = [[-0.5, -1.0]] * N
    broken = [*good[:3], [-0.5, bad], [bad], *good[5:]]
    found = only(refusals(tmp_path, {"logprobs": good}, {"logprobs": broken}), "nonfinite")
    assert (found.count, "B" in found.said) == (2, True)
    assert f"logprobs {bad}: q3" in found.first
    assert "b.jsonl:4" in found.first


def test_null_in_log_probs_is_no_number(tmp_path: Path) -> None:
    """vLLM writes null for the first token of a prompt, which has no probability."""
    values = [[None, -1.0]] * N
    assert refusals(tmp_path, {"logprobs": values}, {"logprobs": [[None, -2.0]] * N}) == ()


def test_a_score_that_is_not_finite_or_missing(tmp_path: Path) -> None:
    found = only(refusals(tmp_path, {}, {"score": [1.0, float("nan"), 0, 0, 1, 1]}), "score")
    assert (found.count, "q1" in found.first) == (1, True)
    missing = only(refusals(tmp_path, {}, {"score": [1.0, 0, 0, None, 1, None]}), "score")
    assert (missing.count, "is missing: q3" in missing.first) == (2, True)


def test_an_extra_token_in_front(tmp_path: Path) -> None:
    """One of both tokenized with a beginning-of-text token and the other without."""
    longer = [[1, *ids[1:]] for ids in IDS]
    found = only(refusals(tmp_path, {"token_ids": [ids[1:] for ids in IDS]}, {"token_ids": longer}), "tokens")
    assert found.count == N
    assert "B has one more in front, id 1" in found.first
    assert "beginning-of-text" in found.first


def test_other_token_ids(tmp_path: Path) -> None:
    other = [*IDS[:2], [1, 12, 99], *IDS[3:]]
    found = only(refusals(tmp_path, {"token_ids": IDS}, {"token_ids": other}), "tokens")
    assert (found.count, found.first) == (1, "q2: from place 2 on, 4 ids in A, 3 in B")


def test_a_doubled_beginning(tmp_path: Path) -> None:
    doubled = [[1, *ids] for ids in IDS]
    found = refusals(tmp_path, {"token_ids": doubled}, {"token_ids": doubled})
    assert [refusal.reason for refusal in found] == ["double_bos", "double_bos"]
    assert found[0].count == N
    assert "id 1 twice" in found[0].first
    one = refusals(tmp_path, {"token_ids": IDS}, {"token_ids": doubled})
    assert [refusal.reason for refusal in one] == ["double_bos", "tokens"]


def test_equal_tokens_at_the_start_of_one_text_are_no_doubled_beginning(tmp_path: Path) -> None:
    stutter = [[7, 7, 5], *IDS[1:]]
    assert refusals(tmp_path, {"token_ids": stutter}, {"token_ids": stutter}) == ()
    template = [[1, 40, *ids] for ids in IDS]
    assert refusals(tmp_path, {"token_ids": template}, {"token_ids": template}) == ()


@pytest.mark.parametrize("token", ["<s>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>"])
def test_a_doubled_beginning_in_the_text(tmp_path: Path, token: str) -> None:
    once, twice = [f"{token}hi {i}" for i in range(N)], [f"{token}{token}hi {i}" for i in range(N)]
    assert refusals(tmp_path, {"prompt": once}, {"prompt": once}) == ()
    found = refusals(tmp_path, {"prompt": twice}, {"prompt": twice})
    assert [(refusal.reason, refusal.count) for refusal in found] == [("double_bos", N)] * 2
    assert f"{token} twice" in found[0].first


def test_other_prompts_and_other_numbers_of_examples(tmp_path: Path) -> None:
    prompts = [f"question {i}" for i in range(N)]
    other = [*prompts[:4], "changed", "too"]
    found = only(refusals(tmp_path, {"prompt": prompts}, {"prompt": other}), "prompt")
    assert (found.count, "q4" in found.first) == (2, True)
    shots = only(refusals(tmp_path, {"num_fewshot": [5] * N}, {"num_fewshot": [0] * N}), "shots")
    assert shots.first.startswith("5 in A, 0 in B")


def test_what_one_side_does_not_say_refuses_nothing(tmp_path: Path) -> None:
    assert refusals(tmp_path, {"prompt": ["x"] * N, "token_ids": IDS}, {}) == ()


def test_ids_of_one_side_and_ids_that_are_there_twice(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", plain([1, 0, 1, 0]))
    b = write(tmp_path / "b.jsonl", [*plain([1, 0, 1]), {"id": "q1", "score": 1}, {"id": "new", "score": 0}])
    found = verdict(a, b).refusals
    assert [(refusal.reason, refusal.count) for refusal in found] == [
        ("duplicate", 1),
        ("unpaired", 1),
        ("unpaired", 1),
    ]
    assert "b.jsonl:2" in found[0].first
    assert "b.jsonl:4" in found[0].first
    assert [refusal.first for refusal in found[1:]] == ["q3", "new"]


def test_nothing_in_common(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", plain([1, 0]))
    b = write(tmp_path / "b.jsonl", [{"id": "z", "score": 1}])
    found = verdict(a, b)
    assert found.reading is Reading.INVALID
    assert [refusal.said.split()[0] for refusal in found.refusals] == ["all", "all"]


def test_every_reason_at_once_is_told(tmp_path: Path) -> None:
    found = refusals(
        tmp_path,
        {"prompt": ["x"] * N, "token_ids": IDS, "num_fewshot": [1] * N},
        {
            "prompt": ["y"] * N,
            "token_ids": [[9, 9]] * N,
            "num_fewshot": [2] * N,
            "logprob": [float("nan")] * N,
        },
    )
    assert [refusal.reason for refusal in found] == ["shots", "prompt", "double_bos", "nonfinite", "tokens"]
    assert all(refusal.remedy for refusal in found)
