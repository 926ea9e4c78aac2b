"""``narrowcast roundtrip``: the anchors, an independent recomputation, all sources, every refusal."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.running import Cli

# Relative MSE on N(0, 1), 2^21 samples: the published anchors, which the targets allow 1 %.
ANCHORS = {
    ("mxfp4", "floor"): 1.322e-2,
    ("mxfp4", "rceil"): 1.332e-2,
    ("mxfp4", "ceil_log2"): 2.080e-2,
    ("mxfp4", "even"): 1.252e-2,
    ("mxfp4", "bump(1.8125)"): 1.246e-2,
}


def test_anchors_of_the_rules(cli: Cli) -> None:
    rules = ",".join(rule for _, rule in ANCHORS)
    answer = cli("roundtrip", "randn:512x4096", "--schemes", "mxfp4", "--rule", rules, "--json").json
    found = {(r["name"], r["rule"]): r["relative_mse"] for r in answer["results"]}
    assert found.keys() == ANCHORS.keys()
    for key, wanted in ANCHORS.items():
        assert found[key] == pytest.approx(wanted, rel=0.01)


def test_anchors_of_the_divisors(cli: Cli) -> None:
    answer = cli("roundtrip", "randn:512x4096", "--schemes", "int4_g128", "--span", "7,7.5,8", "--json").json
    found = {r["span"]: r["relative_mse"] for r in answer["results"]}
    for span, wanted in {7: 1.38e-2, 7.5: 1.225e-2, 8: 1.113e-2}.items():
        assert found[span] == pytest.approx(wanted, rel=0.01)


def test_formats_against_ml_dtypes(cli: Cli, tmp_path: Path) -> None:
    """The same numbers cast by ml_dtypes (inside the range, where casts do not differ)."""
    x = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    x[0, :3] = [0.0, 2.0**-30, -(2.0**-10)]
    np.save(tmp_path / "x.npy", x)
    answer = cli("roundtrip", tmp_path / "x.npy", "--formats", "e4m3fn,e5m2,bf16,fp16,fp32", "--json").json
    kinds = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float16, np.float32)
    assert answer["shape"] == [16, 64]
    for result, kind in zip(answer["results"], kinds, strict=True):
        y = x.astype(kind).astype(np.float64)
        wide = x.astype(np.float64)
        error = np.abs(y - wide)
        relative = error[wide != 0] / np.abs(wide[wide != 0])
        assert result["max_relative_error"] == relative.max()
        assert result["mean_relative_error"] == pytest.approx(relative.mean(), rel=1e-12)
        assert result["underflowed"] == int(((y == 0) & (wide != 0)).sum())
        assert result["clipped"] == 0
        noise = float(np.square(error).sum())
        if noise:
            sqnr = 10 * math.log10(float(np.square(wide).sum()) / noise)
            assert result["sqnr_db"] == pytest.approx(sqnr, rel=1e-12)
        else:
            assert result["sqnr_db"] == "inf"


def test_clipped_and_saturated_are_counted(cli: Cli, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[448.0, 464.0, 465.0, -1000.0, 2.0**-10, 1.0]], np.float32))
    (answer,) = cli("roundtrip", tmp_path / "x.npy", "--formats", "e4m3fn", "--json").json["results"]
    assert (answer["clipped"], answer["underflowed"], answer["saturated"]) == (2, 1, 4)


@pytest.mark.parametrize("source", ["randn:1000", "laplace:10x100", "student5:4x5x50"])
def test_drawn_sources_repeat(cli: Cli, source: str) -> None:
    first = cli("roundtrip", source, "--seed", "7", "--json")
    assert first.code == 0
    assert first.json["seed"] == 7
    assert math.prod(first.json["shape"]) == 1000
    assert cli("roundtrip", source, "--seed", "7", "--json").out == first.out
    assert cli("roundtrip", source, "--seed", "8", "--json").out != first.out


def test_tensor_of_a_checkpoint(cli: Cli, llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    answer = cli("roundtrip", f"{llama}:{name}", "--schemes", "fp8_channel,nvfp4", "--json").json
    assert answer["dtype"] == "bf16"
    np.save(tmp_path / "x.npy", load_file(llama / "model.safetensors")[name].astype(np.float32))
    again = cli("roundtrip", tmp_path / "x.npy", "--schemes", "fp8_channel,nvfp4", "--json").json
    assert answer["results"] == again["results"]


def test_default_page_names_every_trial(cli: Cli) -> None:
    from narrowcast.jobs.roundtrip import FORMATS

    page = cli("roundtrip", "randn:8x256")
    assert page.code == 0
    first = [words[0] for words in page.lines if words]
    assert [name for name in first if name in FORMATS] == list(FORMATS)
    assert "nvfp4" in first


def test_rules_apply_where_they_are_meant(cli: Cli) -> None:
    """A power-of-two rule changes MX scales, an outer rule NVFP4, and neither changes FP8."""
    asked = ("--schemes", "mxfp4,nvfp4,fp8_channel", "--rule", "floor,four_over_six")
    results = cli("roundtrip", "randn:8x256", *asked, "--json").json["results"]
    assert [(r["name"], r["rule"]) for r in results] == [
        ("mxfp4", "floor"), ("nvfp4", "four_over_six"), ("fp8_channel", "amax"),
    ]  # fmt: skip


REFUSED = [
    (("roundtrip", "randn"), 2, "not a source of numbers"),
    (("roundtrip", "randn:0"), 2, "too many samples, or none"),
    (("roundtrip", "randn:99999999999"), 2, "too many samples, or none"),
    (("roundtrip", "gauss:100"), 2, "no such model"),
    (("roundtrip", "missing.npy"), 2, "no such file"),
    (("roundtrip", "randn:8", "--schemes", "mxpf4"), 2, "did you mean mxfp4"),
    (("roundtrip", "randn:8", "--formats", "e4m4fn"), 2, "did you mean e4m3fn"),
    (("roundtrip", "randn:8", "--formats", "e4m3", "--rule", "floor"), 2, "no scheme here takes this rule"),
    (("roundtrip", "randn:8", "--seed", "x"), 2, "--seed: not a count: 'x'"),
    (("roundtrip", "randn:8", "--seed=-1"), 2, "--seed: not a count: '-1'"),
    (("roundtrip", "randn:8", "--formats", ","), 2, "nothing to try"),
    (("roundtrip",), 2, "required: SOURCE"),
]


@pytest.mark.parametrize(("asked", "code", "problem"), REFUSED, ids=[" ".join(a) for a, _, _ in REFUSED])
def test_refusals(cli: Cli, asked: tuple[str, ...], code: int, problem: str) -> None:
    answer = cli(*asked)
    assert (answer.code, answer.out) == (code, "")
    assert problem in answer.err


def test_bad_arrays_are_refused(cli: Cli, tmp_path: Path, llama: Path) -> None:
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "empty.npy", np.zeros((0, 4)))
    np.save(tmp_path / "nan.npy", np.array([[1.0, np.nan]]))
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "noise.npy").write_bytes(b"\x93NUMPY\x01")
    for name, problem in [
        ("text", "not an array of numbers"),
        ("empty", "an empty array"),
        ("nan", "1 NaN and 0 infinite values"),
        ("pickle", "cannot be read as a numpy array"),
        ("noise", "cannot be read as a numpy array"),
    ]:
        answer = cli("roundtrip", tmp_path / f"{name}.npy")
        assert (answer.code, answer.out) == (3, "")
        assert problem in answer.err
    answer = cli("roundtrip", f"{llama}:model.layers.0.mlp.up.weight")
    assert answer.code == 2
    assert "did you mean model.layers.0.mlp.up_proj.weight" in answer.err
