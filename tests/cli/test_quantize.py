"""The face of ``narrowcast quantize``: every flag reaches the job, pages say what the job knows, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import toys
from cli.running import Cli
from narrowcast.jobs.quantize import plan, run
from narrowcast.report.quantize import plan_page, result_page


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_dry_run_writes_nothing_and_forecasts(cli: Cli, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    page = cli("quantize", llama, out, "--preset", "w4a16", "--dry-run", "--ignore", "re:.*down_proj")
    assert page.code == 0
    assert list(tmp_path.iterdir()) == []
    assert page.out.rstrip().endswith("Nothing was written.")
    words = " ".join(page.out.split())
    assert "re:.*down_proj keep 2 2" in words
    assert "everything else w4a16" in words
    assert "note: groups of 64, because 128 does not divide 192 columns" in words
    answer = cli(
        "quantize", llama, out, "--preset", "w4a16", "--dry-run", "--ignore", "re:.*down_proj", "--json"
    ).json
    assert (answer["schema"], answer["verb"]) == (1, "quantize")
    assert f"{answer['forecast_bytes']:,} bytes" in words
    assert answer["lines"][0]["matched"] == 2


def test_result_page(cli: Cli, llama: Path, tmp_path: Path) -> None:
    page = cli("quantize", llama, tmp_path / "out", "--preset", "FP8_DYNAMIC")
    assert page.code == 0
    assert "\r" not in page.err  # no progress without a terminal
    roles = {words[0]: words for words in page.lines if words and words[0] in ("attention", "mlp", "all")}
    assert {role: words[1] for role, words in roles.items()} == {"attention": "8", "mlp": "6", "all": "14"}
    assert "worst 10 tensors" in page.out
    assert sum(words[1:2] == ["fp8_channel"] for words in page.lines) == 10
    assert (tmp_path / "out" / "config.json").is_file()


def test_json_result(cli: Cli, llama: Path, tmp_path: Path) -> None:
    answer = cli("quantize", llama, tmp_path / "out", "--preset", "nvfp4a16", "--json").json
    assert answer["schema"] == 1
    assert set(answer["roles"]) == {"attention", "mlp"}
    assert len(answer["worst"]) == 10
    assert answer["total"]["elements"] == sum(role["elements"] for role in answer["roles"].values())
    assert answer["bytes"] == sum(len(data) for data in files(tmp_path / "out").values())


FLAGS: dict[str, list[str]] = {
    "ignore": ["--preset", "fp8_dynamic", "--ignore", "re:.*o_proj", "--ignore", "re:.*down_proj"],
    "targets": ["--preset", "fp8_dynamic", "--targets", "re:.*mlp.*"],
    "rule": ["--preset", "mxfp4a16", "--rule", "floor"],
    "workers": ["--preset", "fp8_dynamic", "--workers", "1"],
}  # fmt: skip


@pytest.mark.parametrize("flag", list(FLAGS))
def test_flags_do_what_the_function_does(cli: Cli, llama: Path, tmp_path: Path, flag: str) -> None:
    """The command and ``narrowcast.quantize`` with the same options write the same bytes."""
    import narrowcast

    words = FLAGS[flag]
    options: dict[str, Any] = {}
    for name, value in zip(words[2::2], words[3::2], strict=True):
        key = name.removeprefix("--")
        if key in ("ignore", "targets"):
            options.setdefault(key, []).append(value)
        else:
            options[key] = int(value) if key == "workers" else value
    assert cli("quantize", llama, tmp_path / "a", *words, "--quiet").code == 0
    result = narrowcast.quantize(llama, tmp_path / "b", words[1], **options)
    assert result.out == tmp_path / "b"
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_recipe(cli: Cli, llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'default = "fp8_dynamic"\n\n[[rule]]\nmatch = \'re:.*\\.mlp\\..*\'\npreset = "nvfp4a16"\n'
        "\n[[rule]]\nmatch = 'lm_head'\nkeep = true\n"
    )
    page = cli("quantize", llama, tmp_path / "out", "--recipe", recipe, "--dry-run")
    assert page.code == 0
    assert [words[:3] for words in page.lines if "-" in words and words[0] in ("mlp", "attention")] == [
        ["mlp", "nvfp4", "-"]
    ]
    assert "attention fp8_channel fp8_token" in " ".join(page.out.split())
    both = cli("quantize", llama, tmp_path / "out", "--recipe", recipe, "--preset", "int8")
    assert both.code == 2
    assert "a recipe says everything itself" in both.err


def test_resume_takes_up_a_killed_run(cli: Cli, tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m", shards=3)
    words = ("quantize", model, tmp_path / "out", "--preset", "fp8_dynamic", "--quiet")

    class Killed(BaseException):
        pass

    class Dying:
        """Dies when half of the bytes are done, between two shards."""

        def __init__(self, total: int, label: str) -> None:
            self.left = total // 2

        def advance(self, n: int) -> None:
            self.left -= n
            if self.left < 0:
                raise Killed

        def done(self) -> None:
            pass

    with pytest.raises(Killed):
        run(plan(model, tmp_path / "out", "fp8_dynamic", workers=1), progress=Dying)
    refused = cli(*words)
    assert refused.code == 2
    assert "--resume" in refused.err
    assert cli(*words, "--resume").code == 0
    assert cli("quantize", model, tmp_path / "whole", *words[3:]).code == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    again = cli(*words)
    assert again.code == 2
    assert "out" in again.err


def test_workers_reach_the_plan(cli: Cli, llama: Path, tmp_path: Path) -> None:
    """Bytes do not depend on them, so that only the forecast of memory can tell."""
    words = (
        "quantize",
        llama,
        tmp_path / "out",
        "--preset",
        "fp8_dynamic",
        "--dry-run",
        "--json",
        "--workers",
    )
    assert cli(*words, 1).json["peak_memory"] < cli(*words, 8).json["peak_memory"]


def test_nonfinite_refuse_and_copy(cli: Cli, tmp_path: Path) -> None:
    tensors = toys.weights(toys.llama_shapes())
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = ml_dtypes.bfloat16(np.nan)
    model = toys.write(tmp_path / "m", tensors, toys.llama_config())
    refused = cli("quantize", model, tmp_path / "out", "--preset", "fp8_dynamic")
    assert refused.code == 3
    assert "model.layers.1.mlp.down_proj has 1 NaN and 0 infinite values" in refused.err
    assert "row 3, column 5" in refused.err
    assert "--nonfinite copy" in refused.err
    assert not (tmp_path / "out").exists()
    copied = cli(
        "quantize", model, tmp_path / "out", "--preset", "fp8_dynamic", "--nonfinite", "copy", "--json"
    )
    assert copied.code == 0
    assert "model.layers.1.mlp.down_proj" not in {row["tensor"] for row in copied.json["worst"]}


REFUSED = [
    ([], 2, "neither a preset nor a recipe"),
    (["--preset", "fp8_dynamc"], 2, "did you mean fp8_dynamic"),
    (["--preset", "nvfp4"], 2, "use nvfp4a16"),
    (["--preset", "fp8_dynamic+kv8"], 2, "calibration"),
    (["--preset", "fp8_dynamic", "--ignore", "re:.*qproj"], 2, "matches no module"),
    (["--preset", "fp8_dynamic", "--ignore", "re:("], 2, "not a regular expression"),
    (["--preset", "fp8_dynamic", "--container", "gguf"], 2, "`narrowcast convert --to gguf` makes it"),
    (["--preset", "fp8_dynamic", "--nonfinite", "hide"], 2, "invalid choice"),
    (["--preset", "fp8_dynamic", "--workers", "many"], 2, "--workers: not a count"),
    (["--preset", "w4a16", "--strict"], 2, "groups of 128 do not divide"),
    (["--recipe", "missing.toml"], 2, "the recipe cannot be read"),
]


@pytest.mark.parametrize(("words", "code", "problem"), REFUSED, ids=[" ".join(w) for w, _, _ in REFUSED])
def test_refusals(cli: Cli, llama: Path, tmp_path: Path, words: list[str], code: int, problem: str) -> None:
    answer = cli("quantize", llama, tmp_path / "out", *words)
    assert (answer.code, answer.out) == (code, "")
    assert problem in answer.err
    assert list(tmp_path.iterdir()) == []


def test_quantized_source_is_refused(cli: Cli, llama: Path, tmp_path: Path) -> None:
    assert cli("quantize", llama, tmp_path / "a", "--preset", "fp8_dynamic", "--quiet").code == 0
    answer = cli("quantize", tmp_path / "a", tmp_path / "b", "--preset", "nvfp4a16")
    assert answer.code == 3
    assert "the model is quantized already" in answer.err


def test_pages_group_fallbacks_and_show_what_is_kept(llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    settled = plan(llama, tmp_path / "out", "w4a16")
    page = "\n".join(plan_page(settled))
    assert page.count("note: groups of") == len({text.partition(": ")[2] for text in settled.fallbacks})
    for why in settled.kept:
        assert why in page
    done = "\n".join(result_page(run(settled)))
    assert "note: groups of 64" in done
    assert json.dumps(settled.to_json())
