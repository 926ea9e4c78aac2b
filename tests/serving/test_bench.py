"""The bench on a toy model for real: what it says of bytes and floors, counted again here, and vLLM as a child."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

import toys
from narrowcast.cli import main
from narrowcast.errors import InputError, UsageError
from narrowcast.serving import bench as module
from narrowcast.serving.bench import bench

HIDDEN = 64


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toys.llama(tmp_path_factory.mktemp("toy") / "model", hidden=HIDDEN)


def test_bytes_and_floors_of_a_step_are_those_counted_here(toy: Path):
    found = bench(toy, batches=(1, 3), prompt=5, tokens=4, threads=1)
    config = json.loads((toy / "config.json").read_text())
    layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or HIDDEN // heads
    linear = layers * (HIDDEN * dim * (2 * heads + 2 * kv_heads) + 3 * HIDDEN * inner)
    head, norms = config["vocab_size"] * HIDDEN, (2 * layers + 1) * HIDDEN
    (one,) = found.contestants
    assert one.runs_as == "transformers, bf16"
    for row, batch in zip(one.measured, (1, 3), strict=True):
        context = 5 + 2
        cache = batch * layers * 2 * kv_heads * dim * 2 * (context + 1)  # all read, one token written
        rows = 0 if config["tie_word_embeddings"] else batch * HIDDEN * 2  # a tied one is read whole
        moved = row.decode.traffic.moved
        assert moved == 2 * (linear + head + norms) + rows + cache
        assert one.bandwidth is not None
        assert row.decode.bound.memory == pytest.approx(moved / one.bandwidth.best, rel=1e-12)
        assert row.decode.bound.compute == pytest.approx(
            sum(row.decode.traffic.flops.values()) / found.rate, rel=1e-12
        )
        assert row.ratio == pytest.approx(
            row.timing.step / max(row.decode.bound.memory, row.decode.bound.compute)
        )
        assert sum(row.prefill.traffic.flops.values()) >= batch * 5 * 2 * linear


def test_a_prefill_of_a_batch_reads_weights_once_and_multiplies_for_each(toy: Path):
    found = bench(toy, batches=(1, 4), prompt=6, tokens=2, threads=1)
    one, four = (row.prefill for row in found.contestants[0].measured)
    assert four.traffic.weights == one.traffic.weights
    assert four.traffic.cache_written == 4 * one.traffic.cache_written
    assert sum(four.traffic.flops.values()) == pytest.approx(4 * sum(one.traffic.flops.values()))
    assert four.bound.memory == pytest.approx(one.bound.memory * four.traffic.moved / one.traffic.moved)


def test_a_quantized_model_runs_packed_and_reads_fewer_bytes(toy: Path, tmp_path: Path, capsys):
    out = tmp_path / "fp8"
    assert main(["quantize", str(toy), str(out), "--preset", "fp8_dynamic", "--quiet"]) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "bench",
                str(out),
                "--against",
                str(toy),
                "--batch",
                "1,2",
                "--prompt",
                "4",
                "--tokens",
                "2",
                "--json",
            ]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    model, parent = answer["models"]
    assert model["runs_as"] == "packed layers"
    assert model["measured"][0]["bytes_per_step"] < parent["measured"][0]["bytes_per_step"]
    assert [row["batch"] for row in model["measured"]] == [1, 2]
    assert all(row["step"] > 0 and row["prefill"] > 0 for row in model["measured"])


def child(folder: Path, body: str) -> str:
    """A program that stands for vLLM's Python."""
    file = folder / "python"
    file.write_text(f"#!{sys.executable}\n{body}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_vllm_is_timed_by_a_script_in_its_own_python(toy: Path, tmp_path: Path):
    body = (
        "import json, sys\n"
        "script, model, batches, prompt, tokens, threads = sys.argv[1:]\n"
        "assert script.endswith('bench_vllm.py') and prompt == '4' and tokens == '2' and threads == '1'\n"
        "print('a log line')\n"
        "print(json.dumps({'version': '0', 'timings': [[b, 0.5, 0.25] for b in json.loads(batches)]}))\n"
    )
    found = bench(
        toy, batches=(1, 2), prompt=4, tokens=2, engine="vllm", python=child(tmp_path, body), threads=1
    )
    assert [(row.timing.batch, row.timing.prefill, row.timing.step) for row in found.contestants[0].measured] == [
        (1, 0.5, 0.25), (2, 0.5, 0.25),
    ]  # fmt: skip
    assert found.contestants[0].measured[1].tokens_per_second == 8


def test_a_vllm_that_dies_is_told_with_the_end_of_its_log(toy: Path, tmp_path: Path):
    python = child(tmp_path, "import sys\nsys.exit('no such quantization')")
    with pytest.raises(InputError, match="did not run") as told:
        bench(toy, batches=(1,), prompt=4, tokens=2, engine="vllm", python=python, threads=1)
    assert "no such quantization" in str(told.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "0"], "at least 1"),
        (["--batch", "x"], "no batches"),
        (["--engine", "sglang"], "no such runner"),
        (["--engine", "vllm", "--python", "/no/such/python"], "cannot be started"),
        (["--tokens", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(toy: Path, words, said, capsys):
    assert main(["bench", str(toy), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_larger_than_the_free_memory_is_refused(toy: Path, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    with pytest.raises(UsageError, match="does not fit"):
        bench(toy, batches=(1,), prompt=4, tokens=2, threads=1)
