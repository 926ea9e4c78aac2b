"""The bench on toy models for real: what it says of bytes and floors, counted again here, and vLLM as a child.

vLLM is a program here that prints what its CPU build printed; the real one runs in engines/bench.py.
"""

from __future__ import annotations

import ast
import json
import os
import stat
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import toys
from narrowcast.cli import main
from narrowcast.errors import InputError, UsageError
from narrowcast.hardware.bandwidth import Bandwidth
from narrowcast.hardware.cost import Floor
from narrowcast.hardware.gpus import gpus
from narrowcast.report.bench import bench_page
from narrowcast.serving import bench as module
from narrowcast.serving import bench_ours, bench_vllm
from narrowcast.serving.bench import Bench, Contestant, Measured, bench
from narrowcast.serving.loading import load
from narrowcast.serving.steps import Step
from narrowcast.serving.timing import Ran, Timing
from narrowcast.serving.traffic import Traffic
from runtime.families import saved
from serving.engine_flags import SNAPSHOT
from serving.fake_engine import LOGS, REFUSED, SERVED

HIDDEN = 128


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of the machine that are shorter than useful, of the same kind."""
    monkeypatch.setattr(module, "SECONDS", 0.02)
    monkeypatch.setattr(module, "_LEAST", 1 << 20)
    monkeypatch.setattr(bench_ours, "PRODUCT", 256)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    model = toys.llama(tmp_path_factory.mktemp("toy") / "model", hidden=HIDDEN)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return model


def test_bytes_and_floors_of_a_step_are_those_counted_here(toy: Path):
    found = bench(toy, batches=(1, 3), prompt=5, tokens=4, threads=1)
    config = json.loads((toy / "config.json").read_text())
    layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or HIDDEN // heads
    linear = layers * (HIDDEN * dim * (2 * heads + 2 * kv_heads) + 3 * HIDDEN * inner)
    head, norms = config["vocab_size"] * HIDDEN, (2 * layers + 1) * HIDDEN
    (one,) = found.contestants
    assert one.ran.runs_as == "transformers, bf16"
    for row, batch in zip(one.measured, (1, 3), strict=True):
        context = 5 + 2
        cache = batch * layers * 2 * kv_heads * dim * 2 * (context + 1)  # all read, one token written
        rows = 0 if config["tie_word_embeddings"] else batch * HIDDEN * 2  # a tied one is read whole
        moved = row.decode.traffic.moved
        assert moved == 2 * (linear + head + norms) + rows + cache
        assert one.bandwidth is not None
        assert row.decode.bound.memory == pytest.approx(moved / one.bandwidth.best, rel=1e-12)
        assert row.decode.bound.compute == pytest.approx(
            sum(row.decode.traffic.flops.values()) / found.rates["bf16"], rel=1e-12
        )
        assert row.ratio == pytest.approx(
            row.timing.step / max(row.decode.bound.memory, row.decode.bound.compute)
        )
        assert sum(row.prefill.traffic.flops.values()) >= batch * 5 * 2 * linear


def test_a_prefill_of_a_batch_reads_weights_once_and_multiplies_for_each(tmp_path: Path):
    untied = toys.llama(tmp_path / "untied", hidden=HIDDEN, head=True)
    found = bench(untied, batches=(1, 4), prompt=6, tokens=2, threads=1)
    one, four = (row.prefill for row in found.contestants[0].measured)
    assert four.traffic.weights == one.traffic.weights
    assert (one.traffic.gathered, four.traffic.gathered) == (6 * HIDDEN * 2, 4 * 6 * HIDDEN * 2)
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
    """A program that stands for vLLM's Python: it writes down its words and its environment, then does as told."""
    file = folder / "python"
    start = f"import json, os, pathlib, sys\nfolder = pathlib.Path({str(folder)!r})\n"
    start += "(folder / 'words').write_text(json.dumps(sys.argv))\n"
    start += "(folder / 'environment').write_text(json.dumps(dict(os.environ)))\n"
    file.write_text(f"#!{sys.executable}\n{start}{body}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def says(log: str, ending: str) -> str:
    """A body that prints a log of vLLM's CPU build, and ends so."""
    logs = [str(LOGS / f"{log}.{stream}") for stream in ("out", "err")]
    return (
        f"print(open({logs[0]!r}).read())\n"
        f"print(open({logs[1]!r}).read(), file=sys.stderr)\n"
        "asked = json.loads(sys.argv[2])\n"
        f"{ending}\n"
    )


ANSWERS = "print(json.dumps({'version': '0.32.0', 'timings': [[b, 0.5, 0.25] for b in asked['batches']]}))"


def test_vllm_is_timed_by_a_script_in_its_own_python(toy: Path, tmp_path: Path):
    python = child(tmp_path, says(SERVED, ANSWERS))
    found = bench(toy, batches=(1, 2), prompt=4, tokens=2, engine="vllm", python=python, threads=1)
    (one,) = found.contestants
    assert [(row.timing.batch, row.timing.prefill, row.timing.step) for row in one.measured] == [
        (1, 0.5, 0.25), (2, 0.5, 0.25),
    ]  # fmt: skip
    assert one.measured[1].tokens_per_second == 8
    assert one.ran.runs_as == "vLLM 0.32.0"
    assert "linear kernel CPUWNA16LinearKernel for CompressedTensorsWNA16" in one.ran.running
    assert "linear kernel" not in " ".join(
        one.ran.notes
    )  # nothing was planned for a model without quantized layers


def test_vllm_gets_the_flags_of_serve_and_its_cores(toy: Path, tmp_path: Path):
    python = child(tmp_path, says(SERVED, ANSWERS))
    bench(
        toy,
        batches=(3,),
        prompt=4,
        tokens=2,
        engine="vllm",
        python=python,
        threads=1,
        extra=["--enforce-eager"],
    )
    _, script, asked, *flags = json.loads((tmp_path / "words").read_text())
    assert script.endswith("bench_vllm.py")
    assert json.loads(asked) == {"batches": [3], "prompt": 4, "tokens": 2}
    assert flags[:2] == ["--model", str(toy)]
    known = json.loads(SNAPSHOT.read_text())
    newest = known[max(name for name in known if name.startswith("vllm"))]["flags"]
    own = [word for word in flags if word.startswith("--")]
    assert {word.replace("--no-", "--") for word in own} - set(newest) <= {"--enforce-eager"} - set(newest)
    assert {"--no-enable-prefix-caching", "--max-num-batched-tokens", "--kv-cache-memory-bytes"} <= set(own)
    given = dict(pairwise(flags))
    assert given["--max-model-len"] == "7"  # the prompt, the first token, and those that are timed
    assert given["--max-num-seqs"] == "3"
    assert given["--max-num-batched-tokens"] == "12"  # all prompts in one step
    environment = json.loads((tmp_path / "environment").read_text())
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))


def test_another_kernel_than_planned_is_said(toy: Path, tmp_path: Path, capsys):
    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "fp8_dynamic", "--quiet"]) == 0
    python = child(tmp_path, says(SERVED, ANSWERS))
    found = bench(tmp_path / "q", batches=(1,), prompt=4, tokens=2, engine="vllm", python=python, threads=1)
    assert any("was planned, CPUWNA16LinearKernel runs" in note for note in found.contestants[0].ran.notes)


def test_a_vllm_that_refuses_is_told_in_the_doctors_words(toy: Path, tmp_path: Path):
    python = child(tmp_path, says(REFUSED, "sys.exit(1)"))
    with pytest.raises(InputError, match="did not run") as told:
        bench(toy, batches=(1,), prompt=4, tokens=2, engine="vllm", python=python, threads=1)
    assert told.value.remedy
    assert "static_scaled_fp8_quant" in str(told.value)


def test_a_vllm_that_dies_is_told_with_the_end_of_its_log(toy: Path, tmp_path: Path):
    python = child(tmp_path, "import sys\nsys.exit('no such quantization')")
    with pytest.raises(InputError, match="did not run") as told:
        bench(toy, batches=(1,), prompt=4, tokens=2, engine="vllm", python=python, threads=1)
    assert "no such quantization" in str(told.value)


def test_what_vllm_would_refuse_is_not_started(toy: Path, tmp_path: Path):
    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "nvfp4a16", "--quiet"]) == 0
    python = child(tmp_path, "")
    with pytest.raises(UsageError, match="Marlin FP4 not available"):
        bench(tmp_path / "q", batches=(1,), prompt=4, tokens=2, engine="vllm", python=python, threads=1)
    assert not (tmp_path / "words").exists()


def test_a_config_alone_has_nothing_to_time(toy: Path):
    with pytest.raises(UsageError, match="no weights"):
        bench(toy / "config.json", batches=(1,), prompt=2, tokens=1)


def test_the_script_needs_nothing_but_vllm():
    tree = ast.parse(Path(bench_vllm.__file__).read_text())
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names == {"vllm"}


# ---- What is slower than it might be is said


def notes(model: Path, *batches: int) -> str:
    return "; ".join(bench(model, batches=batches, prompt=4, tokens=2, threads=1).contestants[0].ran.notes)


def test_packed_layers_for_few_sequences_have_nothing_to_say(toy: Path, tmp_path: Path):
    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "w4a16", "--quiet"]) == 0
    assert notes(tmp_path / "q", 1, 8) == ""
    assert "more than 8 sequences" in notes(tmp_path / "q", 1, 9)


def test_layers_without_a_packed_product_are_named_with_the_reason(toy: Path, tmp_path: Path):
    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "mxfp6a16", "--quiet"]) == 0
    assert notes(tmp_path / "q", 1) == (
        "14 of 14 quantized linear layers without a packed product: no compiled product reads e2m3 in 6 bits"
    )


def test_a_cache_that_is_wider_than_asked_for_is_said(toy: Path, tmp_path: Path):
    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "w4a16", "--quiet"]) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    }  # fmt: skip
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    found = bench(tmp_path / "q", batches=(1,), prompt=4, tokens=2, threads=1).contestants[0]
    assert found.ran.notes == ("the cache is held in bf16, the checkpoint asks for fp8_e4m3",)
    step = found.measured[0].decode.traffic
    assert step.cache_written == 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, numbers, bytes


def test_experts_are_packed_and_counted_as_active(tmp_path: Path):
    saved("qwen3-moe", tmp_path / "model", torch.bfloat16)
    assert (
        main(["quantize", str(tmp_path / "model"), str(tmp_path / "q"), "--preset", "fp8_dynamic", "--quiet"])
        == 0
    )
    found = bench(tmp_path / "q", against=tmp_path / "model", batches=(1, 3), prompt=4, tokens=2, threads=1)
    quantized, plain = found.contestants
    assert quantized.ran.runs_as == "packed layers"
    (note,) = quantized.ran.notes
    assert "inputs are quantized" in note
    assert quantized.measured[0].decode.traffic.moved < plain.measured[0].decode.traffic.moved


def test_what_is_stored_in_fp32_runs_in_16_bits_and_counts_so(toy: Path, tmp_path: Path):
    wide = toys.llama(tmp_path / "model", hidden=HIDDEN, dtype="fp32")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    model, parent = bench(wide, against=toy, batches=(1,), prompt=4, tokens=2, threads=1).contestants
    assert model.served.nbytes == 2 * parent.served.nbytes
    assert model.measured[0].decode.traffic.moved == parent.measured[0].decode.traffic.moved


def test_integer_products_are_bounded_by_their_own_rate(toy: Path, tmp_path: Path):
    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "int8", "--quiet"]) == 0
    found = bench(tmp_path / "q", batches=(1,), prompt=4, tokens=2, threads=1)
    assert set(found.rates) == {"bf16", "int8"}
    best = max(found.rates.values())
    prefill = found.contestants[0].measured[0].prefill
    assert prefill.bound.compute >= sum(prefill.traffic.flops.values()) / best
    assert set(prefill.traffic.flops) == (
        {"bf16", "int8"} if found.rates["int8"] >= found.rates["bf16"] else {"bf16"}
    )


# ---- The page


def row(batch: int, step: float, floor: float) -> Measured:
    traffic = Traffic(100.0, 0, 0, 0, 0, {"bf16": 1.0})
    one = Step(1, traffic, Floor(floor, floor / 2))
    return Measured(Timing(batch, 64, 32, 2 * step, step), one, one)


def page(monkeypatch: pytest.MonkeyPatch, toy: Path, *rows: tuple[Measured, ...]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    served, band = load(toy), Bandwidth(1e10, 2e10, 1e10, 2, 1 << 28, 9)
    ran = Ran("vLLM 0.32.0", (), ("linear kernel CPUWNA16LinearKernel for CompressedTensorsWNA16", "dtype bfloat16"),
              ("linear kernel: CPUWNA16 was planned, another runs",))  # fmt: skip
    each = tuple(Contestant(served, ran, band, measured) for measured in rows)
    lines = bench_page(Bench(gpus["cpu"], 2, {"bf16": 1e12, "int8": 2e12}, each))
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


def test_contestants_are_compared_by_batch(toy: Path, monkeypatch: pytest.MonkeyPatch):
    model, parent = (row(1, 0.5, 0.1), row(8, 1.0, 0.1)), (row(8, 3.0, 0.1), row(1, 0.25, 0.1))
    text = " ".join(page(monkeypatch, toy, model, parent).split())
    assert "0.50 times the tokens at batch 1, 3.00 times the tokens at batch 8" in text


def test_a_ratio_below_one_is_explained(toy: Path, monkeypatch: pytest.MonkeyPatch):
    assert "A ratio below 1" not in page(monkeypatch, toy, (row(1, 0.5, 0.1),))
    assert "A ratio below 1" in page(monkeypatch, toy, (row(1, 0.5, 0.6),))


def test_what_runs_and_what_is_to_know_of_it_is_on_the_page(toy: Path, monkeypatch: pytest.MonkeyPatch):
    text = page(monkeypatch, toy, (row(1, 0.5, 0.1),))
    assert "CPUWNA16LinearKernel for CompressedTensorsWNA16; dtype bfloat16" in " ".join(text.split())
    assert "was planned, another runs" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "0"], "at least 1"),
        (["--batch", "x"], "no batches"),
        (["--engine", "sglang"], "no such runner"),
        (["--engine", "vllm", "--python", "/no/such/python"], "no such program"),
        (["--", "--enforce-eager"], "for --engine vllm"),
        (["--prompt", "300"], "fewer positions"),
        (["--tokens", "0"], "at least 1"),
        (["--threads", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(toy: Path, words, said, capsys):
    assert main(["bench", str(toy), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_larger_than_the_free_memory_is_refused(toy: Path, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    with pytest.raises(UsageError, match="do not fit"):
        bench(toy, batches=(1,), prompt=4, tokens=2, threads=1)
