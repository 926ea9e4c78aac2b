"""The files that verdicts are read from: lm-eval's own, pass@k records, plain lines, directories, and bad ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from narrowcast.errors import InputError, UsageError
from narrowcast.statistics.proportions import pass_at_k
from narrowcast.studies.verdict import Reading, verdict
from narrowcast.studies.verdict_answers import Asked, read
from studies.answer_files import flips, pair, plain, write

#: Written by lm-eval 0.4.13 with --log_samples: eight questions, as multiple choice with one example and as generation
#: without, asked SmolLM2-135M, its w4a16 in bf16, and the first with three examples. Results are cut down.
LM_EVAL = Path(__file__).parent / "lm_eval"
CHOICE = "samples_toy_choice_2026-11-30T04-39-51.371915.jsonl"


def test_lm_eval_directories() -> None:
    found = verdict(LM_EVAL / "parent", LM_EVAL / "quantized")
    assert found.reading is Reading.UNDECIDED
    rows = {row.task: row for row in found.tasks}
    choice, generate = rows["toy_choice"], rows["toy_generate"]
    assert (choice.metric, choice.a, choice.b, choice.lost, choice.gained) == ("acc", 1.0, 0.875, 1, 0)
    assert (generate.metric, generate.questions, generate.a, generate.b) == ("exact_match", 8, 0, 0)
    assert found.whole is not None
    assert (found.whole.questions, found.whole.metric) == (16, "acc, exact_match")
    assert "acc_norm" in found.notes[0]
    assert "strict, flexible" in found.notes[1]


def test_lm_eval_metric_and_filter_are_what_lm_eval_reports() -> None:
    """0.125 for the flexible filter, as its own table said."""
    found = verdict(
        LM_EVAL / "parent", LM_EVAL / "quantized", metric="acc_norm,exact_match", filter="flexible"
    )
    rows = {row.task: row for row in found.tasks}
    assert (rows["toy_choice"].metric, rows["toy_choice"].b) == ("acc_norm", 0.875)
    assert rows["toy_generate"].b == 0.125
    with pytest.raises(UsageError, match="no answer has this metric"):
        verdict(LM_EVAL / "parent", LM_EVAL / "quantized", metric="acc_norm")


def test_lm_eval_cluster_from_the_question() -> None:
    found = verdict(LM_EVAL / "parent", LM_EVAL / "quantized", cluster="subject")
    assert found.whole is not None
    assert found.whole.clusters == 4  # two subjects of two tasks


def test_lm_eval_other_number_of_examples() -> None:
    found = verdict(LM_EVAL / "parent" / CHOICE, LM_EVAL / "three_shots")
    assert [refusal.reason for refusal in found.refusals] == ["shots", "prompt"]
    assert found.refusals[0].first.startswith("1 in A, 3 in B: toy_choice 0")
    assert found.refusals[0].count == 8


def test_lm_eval_log_prob_that_is_nan(tmp_path: Path) -> None:
    records = [
        json.loads(line)
        for line in (
            LM_EVAL / "quantized" / sorted(p.name for p in (LM_EVAL / "quantized").glob("*choice*"))[0]
        ).open()
    ]
    records[2]["resps"][1][0][0] = "nan"
    broken = write(tmp_path / "broken.jsonl", records)
    found = verdict(LM_EVAL / "parent" / CHOICE, broken)
    assert [(refusal.reason, refusal.count) for refusal in found.refusals] == [("nonfinite", 1)]
    assert "log-prob nan: toy_choice 2 (broken.jsonl:3)" in found.refusals[0].first


def test_a_generated_nan_is_a_text(tmp_path: Path) -> None:
    record = {
        "doc_id": 0,
        "resps": [["nan"]],
        "filtered_resps": ["nan"],
        "metrics": ["exact_match"],
        "exact_match": 1.0,
    }
    file = write(tmp_path / "a.jsonl", [record])
    assert verdict(file, write(tmp_path / "b.jsonl", [record])).refusals == ()


def test_lm_eval_other_settings_and_questions(tmp_path: Path) -> None:
    name = next((LM_EVAL / "parent").glob("*generate*"))
    records = [json.loads(line) for line in name.open()]
    records[0]["arguments"]["gen_args_0"]["arg_1"]["temperature"] = 0.7
    records[1]["doc_hash"] = "0" * 64
    records[2]["target_hash"] = "0" * 64
    found = verdict(name, write(tmp_path / "b.jsonl", records))
    assert [(r.reason, r.count) for r in found.refusals] == [("question", 1), ("target", 1), ("settings", 1)]


def test_less_is_better_is_not_judged(tmp_path: Path) -> None:
    for side in "ab":
        folder = tmp_path / side
        shutil.copytree(LM_EVAL / "parent", folder)
        results = next(folder.glob("results_*.json"))
        facts = json.loads(results.read_text())
        facts["higher_is_better"]["toy_choice"]["acc"] = False
        results.write_text(json.dumps(facts))
    found = verdict(tmp_path / "a", tmp_path / "b")
    assert {row.task: row.metric for row in found.tasks}["toy_choice"] == "acc_norm"
    with pytest.raises(UsageError, match="less is better"):
        verdict(tmp_path / "a", tmp_path / "b", metric="acc,exact_match")


def test_pass_at_k(tmp_path: Path) -> None:
    """A line per sample, as HumanEval's harness writes them, or a list of results; 30 problems of 10 samples."""
    passed_a = [i % 11 for i in range(30)]
    passed_b = [max(0, c - (i % 3)) for i, c in enumerate(passed_a)]
    lines = [
        {"task_id": f"HumanEval/{i}", "completion": f"{i} {j}", "result": "passed", "passed": j < c}
        for i, c in enumerate(passed_a)
        for j in range(10)
    ]
    a = write(tmp_path / "a.jsonl", lines)
    lists = [
        {"task_id": f"HumanEval/{i}", "passed": [j < c for j in range(10)]} for i, c in enumerate(passed_b)
    ]
    b = write(tmp_path / "b.jsonl", lists)
    for k in (1, 3):
        row = verdict(a, b, k=k).whole
        assert row is not None
        assert (row.metric, row.questions) == (f"pass@{k}", 30)
        assert row.a == pytest.approx(sum(pass_at_k(10, c, k) for c in passed_a) / 30)
        assert row.b == pytest.approx(sum(pass_at_k(10, c, k) for c in passed_b) / 30)
    with pytest.raises(UsageError, match="pass@11 needs 11 samples"):
        verdict(a, b, k=11)


def test_one_sample_of_each_problem_is_right_or_wrong(tmp_path: Path) -> None:
    sides = [
        write(tmp_path / f"{side}.jsonl", [{"task_id": i, "passed": bool(x)} for i, x in enumerate(scores)])
        for side, scores in zip("ab", flips(60, 20, 164), strict=True)
    ]
    row = verdict(*sides).whole
    assert row is not None
    assert row.mid_p is not None
    assert (row.lost, row.gained) == (60, 20)


def test_unscored_completions_are_told_apart(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"task_id": "HumanEval/0", "completion": "x"}])
    with pytest.raises(InputError, match="run the tests first"):
        verdict(file, file)


def test_several_files_with_commas_and_tasks_in_lines(tmp_path: Path) -> None:
    a, b = flips(3, 1, 40, 20)
    for side, scores in (("a", a), ("b", b)):
        write(tmp_path / f"{side}1.jsonl", [r | {"task": "one"} for r in plain(scores[:20])])
        write(tmp_path / f"{side}2.jsonl", [r | {"task": "two"} for r in plain(scores[20:])])
    found = verdict(*(f"{tmp_path / f'{side}1.jsonl'},{tmp_path / f'{side}2.jsonl'}" for side in "ab"))
    assert [row.task for row in found.tasks] == ["one", "two"]


def test_one_file_may_have_lost_its_name(tmp_path: Path) -> None:
    renamed = tmp_path / "quantized.jsonl"
    shutil.copy(next((LM_EVAL / "quantized").glob("*choice*")), renamed)
    for files in ((LM_EVAL / "parent" / CHOICE, renamed), (renamed, LM_EVAL / "parent" / CHOICE)):
        assert verdict(*files).refusals == ()


def test_the_same_task_twice_in_a_directory(tmp_path: Path) -> None:
    shutil.copytree(LM_EVAL / "parent", tmp_path / "a")
    shutil.copy(LM_EVAL / "parent" / CHOICE, tmp_path / "a" / CHOICE.replace("T04", "T05"))
    with pytest.raises(InputError, match="toy_choice is there more than once"):
        verdict(tmp_path / "a", LM_EVAL / "parent")


def test_long_prompts_are_not_kept() -> None:
    found = read(LM_EVAL / "parent", Asked())
    assert all(len(value) <= 24 for answer in found.answers for value in answer.facts.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no answers"),
        ("\n\n", "no answers"),
        ("[1, 2]\n", "not a JSON object"),
        ('{"id": 1, "score": 1}\n{"id": 2,', "not JSON"),
        ('{"score": 1}\n', "without an id"),
        ('{"id": {"x": 1}, "score": 1}\n', "without an id"),
        ('{"id": 1, "score": "high"}\n', "no answer has a score"),
        ('{"id": 1, "score": 55.2}\n', "no answer has a score"),
        ('{"id": 1, "score": ' + "9" * 5000 + "}\n", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"task_id": 1, "passed": "yes"}\n', "not true or false"),
        ('{"doc_id": 1, "resps": [], "metrics": [["x"], 3], "acc": 1}\n', "no answer has a score"),
        ("\xff\xfe", "not UTF-8"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, said: str) -> None:
    file, other = tmp_path / "bad.jsonl", tmp_path / "other.jsonl"
    file.write_bytes(text.encode("latin-1"))
    other.write_bytes(file.read_bytes())
    with pytest.raises(InputError) as caught:
        verdict(file, other)
    assert said in str(caught.value)


def test_a_score_beyond_any_number(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text('{"id": 1, "score": 1' + "0" * 400 + "}\n")
    assert [refusal.reason for refusal in verdict(*files).refusals] == ["score", "score"]


def test_missing_files_and_directories_without_answers(tmp_path: Path) -> None:
    a, _ = pair(tmp_path / "x", 1, 1, 4)
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "none.jsonl", tmp_path / "empty"):
        with pytest.raises(InputError):
            verdict(a, other)
    with pytest.raises(InputError, match="not between 0 and 1"):
        verdict(
            *(write(tmp_path / f"{s}.jsonl", [{"id": 0, "score": 1, "bleu": 31.5}]) for s in "ab"),
            metric="bleu",
        )
