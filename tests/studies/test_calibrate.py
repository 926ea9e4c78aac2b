"""Statistics of a run against transformers' own model, merging, resuming, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from narrowcast.cli import main
from narrowcast.errors import NarrowcastError, NonFiniteError, StorageError, UsageError
from narrowcast.jobs.stats import BINS, STARVED, Range, batch, edge, merge, read
from narrowcast.studies import calibrate as study
from narrowcast.studies.calibrate import calibrate
from studies.calibrated_toys import llama, mixture, texts, watched

LENGTHS = (40, 25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama") / "model")


def run(model: Path, out: Path, files: list[str], **more: object) -> study.Calibrated:
    return calibrate(model, out, files, tokens=None, context=64, **more)  # type: ignore[arg-type]


def counted(x: np.ndarray) -> np.ndarray:
    """The histogram by its definition: edges as fractions, each magnitude in the first bin that reaches it."""
    edges = [Fraction(16 + m, 16) * Fraction(2) ** e for e in range(-24, 24) for m in range(16)]
    edges.append(Fraction(2) ** 24)
    floats = np.array([float(value) for value in edges])  # exact: four bits of mantissa
    assert [Fraction(value) for value in floats] == edges
    assert len(edges) == BINS
    found = np.searchsorted(floats, np.abs(x).astype(np.float64).reshape(-1), side="left")
    return np.bincount(np.minimum(found, BINS - 1), minlength=BINS)


def test_inputs_are_those_of_transformers_own_model(model: Path, tmp_path: Path) -> None:
    files = texts(tmp_path, *LENGTHS)
    stats = run(model, tmp_path / "s.safetensors", files).stats
    seen, _ = watched(model, files)
    layers = [name for name in seen if name.startswith("model.layers.") and name.endswith("_proj")]
    assert set(stats.inputs) == set(layers)
    assert len(layers) == 14
    for name, found in stats.inputs.items():
        pieces = [inputs[0][0].numpy() for inputs in seen[name]]
        assert found.pieces.tolist() == [float(np.abs(x).max()) for x in pieces]
        assert found.channels.tolist() == np.abs(np.concatenate(pieces)).max(axis=0).tolist()
        assert found.counts.tolist() == counted(np.concatenate(pieces)).tolist()
        assert found.tokens == sum(LENGTHS)
        assert found.amax == max(found.pieces)
    assert (
        stats.inputs["model.layers.0.mlp.gate_proj"].amax == stats.inputs["model.layers.0.mlp.up_proj"].amax
    )


def test_keys_and_values_are_what_a_cache_holds(model: Path, tmp_path: Path) -> None:
    files = texts(tmp_path, *LENGTHS)
    stats = run(model, tmp_path / "s.safetensors", files).stats
    _, caches = watched(model, files)
    for layer in range(2):
        found = stats.caches[f"model.layers.{layer}.self_attn"]
        for which, attribute in (("k", "keys"), ("v", "values")):
            held = [getattr(cache.layers[layer], attribute)[0].numpy() for cache in caches]
            heads = np.concatenate(held, axis=1)
            assert found[which].channels.tolist() == np.abs(heads).max(axis=(1, 2)).tolist()
            assert found[which].counts.tolist() == counted(heads).tolist()
            assert found[which].tokens == sum(LENGTHS)
        assert found["q"].channels.shape == (4,)
        assert stats.layer_of[f"model.layers.{layer}.self_attn"] == layer


def test_queries_are_rotated(model: Path, tmp_path: Path) -> None:
    """At the first position rotation turns by no angle, so one token's query is the projection itself."""
    files = texts(tmp_path, 2)
    stats = run(model, tmp_path / "s.safetensors", files).stats
    whole = transformers.AutoModelForCausalLM.from_pretrained(model)
    seen, _ = watched(model, files)
    attention = whole.model.layers[0].self_attn
    x = seen["model.layers.0.self_attn.q_proj"][0][0]
    with torch.inference_mode():
        q = attention.q_proj(x).view(1, 2, 4, 16).transpose(1, 2)
        cos, sin = whole.model.rotary_emb(x, torch.arange(2)[None])
        turned, _ = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)
    found = stats.caches["model.layers.0.self_attn"]["q"]
    assert found.channels.tolist() == turned[0].abs().amax(dim=(1, 2)).tolist()
    assert found.channels.tolist() != q[0].abs().amax(dim=(1, 2)).tolist()


def test_experts_see_the_tokens_that_the_router_sends(tmp_path: Path) -> None:
    model = mixture(tmp_path / "model")
    files = texts(tmp_path, 30)
    stats = run(model, tmp_path / "s.safetensors", files).stats
    seen, _ = watched(model, files)
    hidden, chosen = seen["model.layers.0.mlp.experts"][0][:2]
    tokens = stats.experts["model.layers.0.mlp.experts"]
    assert tokens.tolist() == torch.bincount(chosen.flatten(), minlength=8).tolist()
    assert tokens.sum() == 60
    few = [e for e in range(8) if tokens[e] < STARVED]
    assert few, "the toy has no starved expert"
    assert stats.starved == {"model.layers.0.mlp.experts": few}
    for e in range(8):
        rows = hidden[(chosen == e).any(dim=1)]
        for leaf in ("gate_proj", "up_proj"):
            found = stats.inputs[f"model.layers.0.mlp.experts.{e}.{leaf}"]
            assert found.amax == (float(rows.abs().max()) if len(rows) else 0.0)
            assert found.tokens == len(rows)
    own = [stats.inputs[f"model.layers.0.mlp.experts.{e}.down_proj"].amax for e in range(8)]
    assert len(set(own)) > 1
    shared = stats.input_amax()
    assert {shared[f"model.layers.0.mlp.experts.{e}.down_proj"] for e in range(8)} == {max(own)}


def test_little_text_is_said_to_be_little(model: Path, tmp_path: Path) -> None:
    few = run(model, tmp_path / "few.safetensors", texts(tmp_path, 30))
    assert few.to_json()["notes"] == list(few.notes)
    assert [note.split(":")[0] for note in few.notes] == ["30 tokens are few", "one piece of text"]
    enough = run(
        model, tmp_path / "enough.safetensors", texts(tmp_path, study.FEW // 2, study.FEW // 2, seed=3)
    )
    assert enough.stats.tokens == study.FEW
    assert enough.notes == ()


def test_a_merge_is_one_run_over_both_texts(model: Path, tmp_path: Path) -> None:
    first, second = texts(tmp_path, 40, 8, seed=1), texts(tmp_path, 25, seed=2)
    a = run(model, tmp_path / "a.safetensors", first).stats
    b = run(model, tmp_path / "b.safetensors", second).stats
    both = run(model, tmp_path / "c.safetensors", first + second).stats
    study.merge([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "ab.safetensors")
    for found in (merge(a, b), read(tmp_path / "ab.safetensors")):
        assert found.tokens == both.tokens
        for name, seen in both.inputs.items():
            _same(found.inputs[name], seen)
        for path, ranges in both.caches.items():
            for which, seen in ranges.items():
                _same(found.caches[path][which], seen)


def _same(a: Range, b: Range) -> None:
    assert a.tokens == b.tokens
    for part in ("counts", "pieces", "channels"):
        assert np.array_equal(getattr(a, part), getattr(b, part)), part


def test_a_file_reads_back_and_stores_equal_inputs_once(model: Path, tmp_path: Path) -> None:
    stats = run(model, tmp_path / "s.safetensors", texts(tmp_path, 20)).stats
    found = read(tmp_path / "s.safetensors")
    assert (found.fingerprint, found.kin, found.texts) == (stats.fingerprint, stats.kin, stats.texts)
    for name, seen in stats.inputs.items():
        _same(found.inputs[name], seen)
    from safetensors import safe_open

    with safe_open(tmp_path / "s.safetensors", "np") as file:
        names = list(file.keys())
    assert "model.layers.0.self_attn.q_proj.input.counts" in names
    assert "model.layers.0.self_attn.k_proj.input.counts" not in names


KILLED = """
import os, sys, signal
from narrowcast.studies.calibrate import calibrate
class Bar:
    def __init__(self, total, label): self.left = int(sys.argv[3])
    def advance(self, n):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def done(self): pass
calibrate(sys.argv[1], sys.argv[2], sys.argv[4:], tokens=None, context=64, progress=Bar)
"""


def test_killed_and_resumed_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    files = texts(tmp_path, 30, 18)
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    run(model, whole, files)
    done = subprocess.run([sys.executable, "-c", KILLED, model, out, "1", *files], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    partial = tmp_path / "out.safetensors.partial"
    assert not out.exists()
    assert (partial / "layer-00000.safetensors").exists()
    (partial / "layer-00001.safetensors.tmp").write_bytes(b"half")
    with pytest.raises(UsageError, match="partial output"):
        run(model, out, files)
    with pytest.raises(StorageError, match="another calibration"):
        run(model, out, texts(tmp_path, 31, seed=9), resume=True)
    looked = _layers_run(model, out, files)
    assert looked == [1]
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def _layers_run(model: Path, out: Path, files: list[str]) -> list[int]:
    """Resume, and say which layers were run for it."""
    ran: list[int] = []
    real = study.watch_layer

    def noted(run: object, i: int, *rest: object) -> object:
        ran.append(i)
        return real(run, i, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "watch_layer", noted)
        run(model, out, files, resume=True)
    return ran


def test_stopped_while_it_wrote_the_last_states(model: Path, tmp_path: Path) -> None:
    """Hidden states without their layer's statistics are written again."""
    files = texts(tmp_path, 30, 18)
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    run(model, whole, files)
    subprocess.run([sys.executable, "-c", KILLED, model, out, "2", *files], capture_output=True)
    partial = tmp_path / "out.safetensors.partial"
    (partial / "layer-00001.safetensors").unlink()
    (partial / "hidden-00001.safetensors").write_bytes((partial / "hidden-00002.safetensors").read_bytes())
    (partial / "layer-00000.safetensors").unlink()
    assert _layers_run(model, out, files) == [0, 1]
    assert out.read_bytes() == whole.read_bytes()


def test_two_runs_give_the_same_bytes_in_bf16(model: Path, tmp_path: Path) -> None:
    files = texts(tmp_path, 30, 7)
    for name in ("a", "b"):
        run(model, tmp_path / name, files, dtype="bfloat16")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read(tmp_path / "a").dtype == "bfloat16"


def test_statistics_of_another_model_do_not_merge(model: Path, tmp_path: Path) -> None:
    files = texts(tmp_path, 10)
    a = run(model, tmp_path / "a", files).stats
    b = run(llama(tmp_path / "other", seed=5), tmp_path / "b", files).stats
    assert a.fingerprint != b.fingerprint
    with pytest.raises(UsageError, match="another model"):
        merge(a, b)
    c = run(model, tmp_path / "c", files, dtype="bfloat16").stats
    with pytest.raises(UsageError, match="dtypes"):
        merge(a, c)


def test_a_model_that_computes_infinity_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 2e4
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"input of model\.layers\.1\.mlp\.down_proj"):
        run(model, tmp_path / "s", texts(tmp_path, 10), dtype="float16")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_and_shares_are_what_they_say(seed: int) -> None:
    random = np.random.default_rng(seed)
    x = (random.standard_normal((50, 33)) * np.exp2(random.integers(-12, 12, (50, 33)))).astype(np.float32)
    x[3, 4], x[5, 6] = 448.0, -448.0
    seen = Range.empty(33, 1)
    seen.add(0, batch(x))
    size = np.sort(np.abs(x).reshape(-1))
    assert seen.beyond(448.0) == int((size > 448).sum())
    assert seen.at("p100") == seen.amax == float(size[-1])
    for share in (1, 50, 90, 99.9):
        true = float(size[int(np.ceil(len(size) * share / 100)) - 1])
        found = seen.at(f"p{share}")
        assert found >= true
        assert found == seen.amax or found <= true * 17 / 16  # one step of four bits of mantissa
    edges = {edge(b) for b in range(BINS)} | {seen.amax}
    assert seen.at("p50") in edges


def test_the_moving_average_is_torchs(tmp_path: Path) -> None:
    from torch.ao.quantization import MovingAverageMinMaxObserver

    random = np.random.default_rng(0)
    observer = MovingAverageMinMaxObserver(averaging_constant=0.01)
    seen = Range.empty(4, 40)
    for piece in range(40):
        x = random.standard_normal((7, 4)).astype(np.float32)
        seen.add(piece, batch(x))
        observer(torch.from_numpy(np.abs(x)))
    # torch rounds to fp32 three times a step, an error of at most 3 · 2^-24 of the mean each
    assert abs(seen.at("ema") - float(observer.max_val)) <= 40 * 3 * 2.0**-24 * seen.amax


def test_delayed_takes_the_last_1024_pieces() -> None:
    seen = Range.empty(1, 2000)
    for piece in range(2000):
        seen.add(piece, batch(np.float32([[2000 - piece]])))
    assert seen.at("amax") == 2000
    assert seen.at("delayed") == 1024  # pieces 976 to 1999


def test_pieces_without_a_token_change_no_average() -> None:
    seen, all_seen = Range.empty(1, 3), Range.empty(1, 2)
    for piece, value in ((0, 4.0), (2, 8.0)):
        seen.add(piece, batch(np.float32([[value]])))
        all_seen.add(piece // 2, batch(np.float32([[value]])))
    assert seen.at("ema") == all_seen.at("ema") == float(np.float32(4.04))


@pytest.mark.parametrize("stat", ["p0", "p101", "max", "p", "pp9", "p-1"])
def test_no_such_statistic(stat: str) -> None:
    with pytest.raises(UsageError, match="no such statistic"):
        Range.empty(1, 1).at(stat)


def test_what_is_no_file_of_statistics(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read(tmp_path / "nothing")
    with pytest.raises(NarrowcastError, match="no calibration statistics"):
        read(model / "model.safetensors")


def test_the_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = texts(tmp_path, 20, 12)
    number = count()
    made = []
    for file in files:
        made.append(str(tmp_path / f"s{next(number)}"))
        assert main(["calibrate", str(model), "--text", file, "-o", made[-1], "-q"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80 or str(tmp_path) in page
    assert "down_proj" in page
    assert "keys" in page
    assert main(["calibrate", "--merge", *made, "-o", str(tmp_path / "both"), "--json"]) == 0
    assert '"tokens": 32' in capsys.readouterr().out
    assert main(["calibrate", "-o", str(tmp_path / "x")]) == 2
    assert main(["calibrate", str(model), "--merge", *made, "-o", str(tmp_path / "x")]) == 2
    assert main(["calibrate", str(model), "--text", files[0], "-o", made[0]]) == 2  # it exists


def test_a_directory_is_no_file_to_make(tmp_path: Path) -> None:
    """An empty directory is a place for a checkpoint; for a file it is refused before anything runs."""
    model, files = llama(tmp_path / "model"), texts(tmp_path / "texts", 8)
    (tmp_path / "stats").mkdir()
    with pytest.raises(UsageError, match="the output is a directory"):
        calibrate(model, tmp_path / "stats", files)
    assert not (tmp_path / "stats.partial").exists()
