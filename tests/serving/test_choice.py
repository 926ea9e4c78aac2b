"""Presets in their order: what runs, natively, the floor with its ties, and what evaluations say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from narrowcast.errors import InputError, UsageError
from narrowcast.hardware.gpus import gpus
from narrowcast.model.roles import Role
from narrowcast.report.records import record
from narrowcast.serving.choice import Choice, Option, deciding, ranked
from narrowcast.serving.evaluations import Quality, qualities
from narrowcast.serving.loading import from_config
from narrowcast.serving.paths import kernels
from narrowcast.serving.question import Question
from narrowcast.statistics.bootstrap import Interval
from narrowcast.studies.evaluation import Asked, Evaluation, Gap, Histogram, Percentiles, Side, Text
from serving.configs import DEEPSEEK_V3, LLAMA3_8B


def option(preset: str, decode: float | None, runs: str = "natively", **more: Any) -> Option:
    fields = {
        "arithmetic": "fp8",
        "kernel": "",
        "fits": True,
        "prefill": 1.0,
        "tokens": 1,
        "nbytes": 1,
        "quality": None,
    }
    return Option(preset, runs, decode=decode, **(fields | more))  # type: ignore[arg-type]


def quality(preset: str, kl: float, says: str = "measured") -> Quality:
    return Quality(preset, says, "said", kl, kl / 2, kl * 2, 0.01, 0.9, "parent", "file")


def order(*options: Option) -> list[str]:
    return [one.preset for one in ranked(options)]


def test_native_arithmetic_comes_before_a_lower_floor() -> None:
    assert order(option("w4a16", 1.0, "weight only"), option("int8", 2.0)) == ["int8", "w4a16"]


def test_the_kernel_of_most_quantized_parameters_decides() -> None:
    question = Question(gpus["h200"], tp=8)
    for preset in ("fp8_block", None):
        found = deciding(kernels(from_config("model", DEEPSEEK_V3, preset=preset), question))
        assert Role.EXPERT in {group.matrix.role for group in found.groups}
    small = from_config(
        "model", LLAMA3_8B | {"num_hidden_layers": 1}, preset="w4a16"
    )  # the embedding is larger
    assert "q_proj" in deciding(kernels(small, question)).names


def test_the_tiers_in_their_order() -> None:
    found = order(
        option("mxfp6a16", None, "refused", refusal="no"), option("w8a16", 2.0, fits=False),
        option("fp8", 1.0, quality=quality("fp8", 1.0, "worse")), option("mxfp8", 1.0, "emulated"),
        option("mxfp4xfp8", 1.0, "unknown"), option("w4a16", 3.0, "weight only"), option("int8", 5.0),
    )  # fmt: skip
    assert found == ["int8", "w4a16", "mxfp4xfp8", "mxfp8", "fp8", "w8a16", "mxfp6a16"]


def test_floors_within_five_percent_are_ties_and_the_wider_comes_first() -> None:
    found = ranked(
        [option("nvfp4", 1.0), option("w4afp8", 1.04), option("fp8_dynamic", 1.05), option("int8", 1.051)]
    )
    assert [(one.preset, one.rank) for one in found] == [
        ("fp8_dynamic", 1), ("w4afp8", 1), ("nvfp4", 1), ("int8", 4),
    ]  # fmt: skip
    assert "within 5 % of w4afp8, nvfp4" in " ".join(found[0].reasons)


def test_ties_are_counted_from_the_lowest_floor_not_from_the_neighbour() -> None:
    """Three floors 4 % apart are not all alike: the last is 8.2 % above the first."""
    found = ranked([option("nvfp4", 1.0), option("mxfp4", 1.04), option("fp8_dynamic", 1.0816)])
    assert [one.rank for one in found] == [1, 1, 3]


def test_among_equal_bits_stored_input_scales_come_last() -> None:
    assert order(option("fp8", 1.0), option("int8", 1.0), option("fp8_dynamic", 1.0)) == [
        "fp8_dynamic",
        "int8",
        "fp8",
    ]


def test_ties_that_are_all_measured_go_by_kl() -> None:
    near, far = quality("int8", 0.01), quality("fp8_dynamic", 0.02)
    assert order(option("fp8_dynamic", 1.0, quality=far), option("int8", 1.0, quality=near)) == [
        "int8",
        "fp8_dynamic",
    ]
    assert order(option("fp8_dynamic", 1.0), option("int8", 1.0, quality=near)) == ["fp8_dynamic", "int8"]


@pytest.mark.parametrize("says", ["worse", "probable bug"])
def test_what_was_measured_as_worse_is_put_down_with_the_reason(says: str) -> None:
    found = ranked(
        [option("fp8_dynamic", 1.0, quality=quality("fp8_dynamic", 1.0, says)), option("int8", 2.0)]
    )
    assert [one.preset for one in found] == ["int8", "fp8_dynamic"]
    assert found[1].reasons[-1] == "put down: measured: said"
    assert found[0].reasons[-1] == "quality not measured"


@pytest.mark.parametrize("says", ["fine", "undecided", "measured", "identical"])
def test_other_verdicts_leave_the_place(says: str) -> None:
    assert (
        order(option("fp8_dynamic", 1.0, quality=quality("x", 1.0, says)), option("int8", 2.0))[0]
        == "fp8_dynamic"
    )


def test_every_row_has_a_reason() -> None:
    words = ("natively", "mixed", "weight only", "unknown", "emulated", "refused")
    for one in ranked([option("int8", 1.0, runs, refusal="why") for runs in words]):
        assert all(one.reasons)


def test_the_careful_choice_keeps_eight_bits_or_was_measured() -> None:
    wide = option("bf16", 4.0)
    options = ranked([option("nvfp4", 1.0), option("fp8_dynamic", 2.0)])
    found = Choice(options, wide)
    named = [one.preset if one is not None else None for one in (found.first, found.careful, found.fastest)]
    assert named == ["nvfp4", "fp8_dynamic", "nvfp4"]
    measured = Choice((replace(options[0], quality=quality("nvfp4", 0.01, "fine")), options[1]), wide)
    assert measured.careful is measured.options[0]
    assert Choice(ranked([option("nvfp4", 1.0, fits=False)]), wide).first is None


def evaluation(
    path: str, asked: Asked | None = None, online: str | None = None, parent: bool = True
) -> dict[str, Any]:
    """A real record of an evaluation, as evaluate --json prints it."""
    interval = Interval(0.02, 0.01, 0.03, 12, "bootstrap", 0.95)
    percentiles = Percentiles(((50.0, 0.0),), 0.0, 1.0)
    gap = Gap(
        False, interval, interval, percentiles, Histogram((0.0,), (), 0), replace(interval, estimate=0.9), interval,
        interval, 0.1, percentiles,
    )  # fmt: skip
    side = Side(path, "compressed-tensors", "bfloat16", interval, online)
    found = Evaluation(
        Text("text", "0" * 64, 1, 1, 1, 1, ((0, "a"),), "tok"), side, side if parent else None, gap if parent else None,
        asked=asked or Asked(),
    )  # fmt: skip
    written: dict[str, Any] = json.loads(record("evaluate", found.to_json()))
    return written


def write(folder: Path, name: str, facts: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps(facts))
    return path


def test_numbers_and_verdict_of_an_evaluation(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", evaluation("models/Toy-FP8_DYNAMIC", Asked(max_kl=0.005)))
    (found,) = qualities([file]).values()
    assert (found.preset, found.says, found.kl, found.kl_low, found.kl_high) == (
        "fp8_dynamic", "worse", 0.02, 0.01, 0.03,
    )  # fmt: skip
    assert (found.perplexity, found.top1, found.worse) == (0.02, 0.9, True)


def test_whose_it_is_by_name_online_scheme_or_path(tmp_path: Path) -> None:
    def of(given: str, facts: dict[str, Any]) -> str:
        file = write(tmp_path, "b.json", facts)
        return next(iter(qualities([f"{given}{file}"])))

    assert of("w4a16=", evaluation("models/Toy-FP8_DYNAMIC")) == "w4a16"
    assert of("", evaluation("models/Toy", online="fp8_per_channel")) == "fp8_dynamic"
    assert of("", evaluation("models/Toy-NVFP4A16")) == "nvfp4a16"
    assert of("", evaluation("models/toy_w4a16_asym.v2")) == "w4a16_asym"


def test_whose_it_is_by_what_lies_there(tmp_path: Path) -> None:
    from narrowcast.jobs.quantize import quantize

    quantize(toys.llama(tmp_path / "toy", hidden=192), tmp_path / "out", "int8")
    file = write(tmp_path, "c.json", evaluation(str(tmp_path / "out")))
    assert list(qualities([file])) == ["int8"]


@pytest.mark.parametrize(
    ("facts", "error", "said"),
    [
        ({"verb": "audit"}, InputError, "no evaluation"),
        ({"verb": "evaluate", "verdict": {"says": "fine"}}, InputError, "no evaluation"),
        ({"verb": "evaluate", "verdict": [], "child": 3}, InputError, "no evaluation"),
        (evaluation("models/toy"), UsageError, "which preset"),
        (evaluation("models/toy-int8", parent=False), InputError, "no parent"),
    ],
)
def test_what_is_no_evaluation_of_a_preset(
    facts: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        qualities([write(tmp_path, "d.json", facts)])


def test_files_that_are_none(tmp_path: Path) -> None:
    broken = tmp_path / "e.json"
    broken.write_text("[")
    with pytest.raises(InputError):
        qualities([broken])
    with pytest.raises(UsageError, match="no such evaluation"):
        qualities([tmp_path / "missing.json"])


def test_two_of_one_preset_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "f.json", evaluation("models/toy-int8"))
    with pytest.raises(UsageError, match="two evaluations of int8"):
        qualities([file, f"w8a8={file}"])
