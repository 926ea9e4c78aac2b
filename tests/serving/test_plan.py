"""One plan from all its parts: what is planned, what is compared, in which container, and nothing heavy imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import narrowcast
import toys
from narrowcast.errors import UsageError
from narrowcast.hardware.gpus import gpus
from narrowcast.jobs.quantize import quantize
from narrowcast.report.plan import plan_page
from narrowcast.report.records import record
from narrowcast.serving import weighed
from narrowcast.serving.loading import load
from narrowcast.serving.plan import plan
from narrowcast.serving.variants import Variants
from narrowcast.tensors.presets import presets
from runtime.families import saved
from serving.configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA3_8B


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path / "Llama-3-8B", LLAMA3_8B)


def test_the_worked_example(llama: Path) -> None:
    """Llama-3-8B on a 24 GB card: about 16 GB and 40,000 to 48,000 tokens in BF16; with FP8 linears and an FP8 cache
    about 9 GB and 190,000 to 200,000."""
    wide = plan(llama, "L4")
    assert (wide.memory.total / 1e9, wide.memory.fits) == (pytest.approx(16.06, rel=1e-3), True)
    assert 40_000 <= (wide.memory.tokens or 0) <= 48_000
    narrow = plan(llama, "L4", preset="fp8_dynamic", kv="fp8")
    assert narrow.memory.total / 1e9 == pytest.approx(9.09, rel=1e-3)
    assert 190_000 <= (narrow.memory.tokens or 0) <= 200_000


def test_the_floor_is_bytes_over_bandwidth(llama: Path) -> None:
    """7.50e9 streamed parameters over 3.35 TB/s are 4.48 ms, and the cache of one token adds next to nothing."""
    found = plan(llama, "H100", context=1)
    assert found.steps.decode.seconds == pytest.approx(4.48e-3, abs=1e-5)


def test_an_unquantized_model_is_planned_as_it_is_and_all_presets_beside_it(llama: Path) -> None:
    found = plan(llama, "L4")
    assert found.served.preset is None
    assert found.choice is not None
    assert {option.preset for option in found.choice.options} == set(presets)
    assert found.choice.wide.preset == "bf16"


def test_one_preset_is_planned_and_nothing_is_ranked(llama: Path) -> None:
    found = plan(llama, "L4", preset="W4A16")
    assert (found.served.preset, found.choice) == ("w4a16", None)


def test_of_several_presets_the_first_in_rank_is_planned(llama: Path) -> None:
    found = plan(llama, "L4", preset=["w4a16", "fp8_dynamic"])
    assert found.choice is not None
    assert [option.preset for option in found.choice.options] == ["fp8_dynamic", "w4a16"]
    assert found.served.preset == "fp8_dynamic"


@pytest.mark.parametrize(
    ("gpu", "first", "native"),
    [
        ("l4", "fp8_dynamic", {"fp8", "int8"}),
        ("a100", "int8", {"int8"}),
        ("h100", "w4afp8", {"fp8", "int8"}),
        ("mi300x", "fp8_dynamic", {"fp8", "int8"}),
        ("b200", "nvfp4", {"fp8", "nvfp4", "mxfp4", "mxfp8"}),
    ],
)
def test_what_comes_first_is_what_the_gpu_multiplies(
    gpu: str, first: str, native: set[str], llama: Path
) -> None:
    """Only formats with an instruction are computed natively; FP8 on an A100 is none of them."""
    found = plan(llama, gpu).choice
    assert found is not None
    assert {option.arithmetic for option in found.options if option.runs == "natively"} <= native
    assert found.first is not None
    assert found.first.arithmetic in native
    bits = {option.preset: presets[option.preset].linear.weight.element.bits for option in found.options}
    assert bits[found.first.preset] == bits[first]
    assert found.careful is not None
    assert bits[found.careful.preset] == 8


def test_presets_whose_blocks_a_rank_would_cut_are_refused(llama: Path) -> None:
    """14336 rows on 32 ranks are 448 each, no multiple of 128 and one of 32."""
    found = plan(llama, "H100", tp=32).choice
    assert found is not None
    placed = {option.preset: option for option in found.options}
    assert "448 is not a multiple of 128" in (placed["fp8_block"].refusal or "")
    assert (placed["fp8_block"].runs, placed["fp8_dynamic"].runs) == ("refused", "natively")


def test_a_model_that_does_not_fit_says_so_and_ranks_what_does(tmp_path: Path) -> None:
    model = written(tmp_path / "m", LLAMA3_8B | {"num_hidden_layers": 90})
    found = plan(model, "L4")
    assert found.memory.fits is False
    assert found.choice is not None
    assert found.choice.first is not None
    assert found.choice.first.fits
    places = [option.fits for option in found.choice.options if option.runs in ("natively", "weight only")]
    assert False in places
    assert places == sorted(places, reverse=True)


def test_the_context_nobody_asked_for_is_said(tmp_path: Path, llama: Path) -> None:
    short = written(tmp_path / "short", LLAMA3_8B | {"max_position_embeddings": 2048})
    long = written(tmp_path / "long", LLAMA3_8B | {"max_position_embeddings": 131072})
    assert (plan(short, "L4").question.context, plan(long, "L4").question.context) == (2048, 8192)
    assert "Sequences of 8,192 tokens of the model's 131,072" in plan(long, "L4").assumed[0]
    assert not [text for text in plan(llama, "L4", context=4096).assumed if "Sequences" in text]


@pytest.mark.parametrize("name", ["fp8_dynamic", "w4a16_asym", "nvfp4", "mxfp4", "int8", "fp8_dynamic+kv8"])
def test_a_model_read_once_is_what_it_is_read_anew(name: str, tmp_path: Path) -> None:
    """The presets of the table and a preset that is asked for are the same bytes, from headers and from a config."""
    model = toys.llama(tmp_path / "toy", hidden=192)
    for place in (model, model / "config.json"):
        variants = Variants(place, load(place), "vllm", gpus["l4"])
        assert variants.written(name) == load(place, preset=name)


def test_many_headers_are_weighed_instead_of_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan from the files' weight as from their headers; a tensor more is seen, and then they are read."""
    shapes, config = toys.llama_shapes(hidden=192), toys.llama_config(hidden=192)
    model = toys.write(tmp_path / "toy", toys.weights(shapes), config, shards=3)
    more = toys.write(tmp_path / "more", toys.weights(shapes | {"model.extra.weight": (1,)}), config)
    read = plan(model, "L4")
    monkeypatch.setattr(weighed, "LONG", 0)
    found = plan(model, "L4")
    assert (read.served.origin, found.served.origin) == ("headers", "config")
    assert "the files weigh what the config says" in found.served.notes[-1]
    assert (found.steps, found.memory) == (read.steps, read.memory)
    assert (found.served.name, found.served.nbytes) == (read.served.name, read.served.nbytes)
    assert plan(more, "L4").served.origin == "headers"


def test_what_no_config_counts_is_taken_off_the_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrections of routers and layers for further tokens beside a mixture of experts; and a shard that lies."""
    model = saved("deepseek-v3", tmp_path / "toy", torch.bfloat16)
    tensors = load_file(model / "model.safetensors")
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    last = {name: one for name, one in tensors.items() if f".layers.{layers - 1}." in name}
    tensors |= {name.replace(f".{layers - 1}.", f".{layers}.", 1): one.clone() for name, one in last.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert any("e_score_correction_bias" in name for name in tensors)
    read = plan(model, "L4")
    monkeypatch.setattr(weighed, "LONG", 0)
    found = plan(model, "L4")
    assert (read.served.origin, found.served.origin) == ("headers", "config")
    assert "without buffers and MTP layers" in found.served.notes[-1]
    assert found.served.nbytes == read.served.nbytes
    assert found.steps.decode == read.steps.decode
    save_file(tensors | {"model.extra": torch.zeros(1)}, model / "model.safetensors", {"format": "pt"})
    assert plan(model, "L4").served.origin == "headers"


def test_presets_are_put_where_the_engine_reads_them(llama: Path) -> None:
    def container(engine: str, name: str) -> str:
        return Variants(llama, load(llama), engine, gpus["h100"]).written(name).container

    assert container("vllm", "fp8_dynamic") == "compressed-tensors"
    assert container("vllm", "fp8_block_ue8m0") == "fp8"  # compressed-tensors has no word for it
    assert container("vllm", "mxfp6a16") == "quark"  # vLLM refuses it in compressed-tensors
    assert container("tensorrt-llm", "fp8") == "modelopt"
    with pytest.raises(UsageError, match="awq has no spelling"):
        Variants(llama, load(llama), "vllm", gpus["h100"], "awq").written("int8")


def test_a_quantized_checkpoint_is_planned_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(toys.llama(tmp_path / "toy", hidden=192), out, "int8")
    found = plan(out, "a100")
    assert (found.choice, found.served.container, found.runs) == (None, "compressed-tensors", "natively")
    with pytest.raises(UsageError, match="quantized already"):
        plan(out, "a100", preset="fp8_dynamic")


@pytest.mark.parametrize(
    "config", [LLAMA3_8B, DEEPSEEK_V3, GPT_OSS_20B], ids=["llama", "deepseek", "gpt-oss"]
)
def test_the_record_holds_what_the_page_says(config: dict[str, Any], tmp_path: Path) -> None:
    found = plan(written(tmp_path / "m", config), "H200", tp=8, ep=True, batch=4)

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    facts = json.loads(record("plan", found.to_json()), parse_constant=refuse)
    assert facts["memory"]["fits"] == facts["fits"] == found.memory.fits
    assert facts["floor"]["decode"]["seconds_at_least"] == found.steps.decode.seconds
    assert [row["verdict"] for row in facts["path"]] == [row.verdict for row in found.kernels]
    assert {row["name"] for row in facts["do_not"]} == {caution.name for caution in found.cautions}
    assert facts["serve"]["argv"][:2] == ["vllm", "serve"]
    assert plan_page(found)


def test_modes_of_the_cache_have_floors_of_their_own(llama: Path) -> None:
    """Each is what the plan with that mode says; a refused one has none."""
    found = {use.cache.mode: use for use in plan(llama, "L4", preset="fp8_dynamic", batch=4).caches}
    for mode in ("bf16", "fp8_e4m3", "int4_per_token_head"):
        assert (
            found[mode].decode
            == plan(llama, "L4", preset="fp8_dynamic", batch=4, kv=mode).steps.decode.seconds
        )
    assert found["fp8_head"].refusal is not None
    assert found["fp8_head"].decode is None


def test_a_preset_that_does_not_fit_says_with_which_cache_it_would(llama: Path) -> None:
    """16 sequences of 8192 are 17.2 GB in BF16 and 8.6 in FP8; 9.09 GB of weights leave 12.5 of 21.6."""
    found = plan(llama, "L4", context=8192, batch=16).choice
    assert found is not None
    placed = {option.preset: option for option in found.options}
    assert placed["fp8_dynamic"].fits is False
    assert "fp8_e4m3" in placed["fp8_dynamic"].caches
    assert "bf16" not in placed["fp8_dynamic"].caches
    assert "fp8_e4m3" not in found.wide.caches


def test_by_import(llama: Path) -> None:
    assert narrowcast.plan(llama, gpu="L4", batch=2).steps == plan(llama, "L4", batch=2).steps


def test_nothing_heavy_is_imported(llama: Path) -> None:
    """A plan is numpy and headers; torch alone takes seconds to import."""
    line = (
        "import sys; from narrowcast.cli import main; "
        f"main(['plan', {str(llama)!r}, '--gpu', 'L4']); "
        "print([name for name in ('torch', 'numba', 'transformers', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("typed", "meant"), [("VLLM", "vllm"), ("trtllm", "tensorrt-llm"), ("TensorRT_LLM", "tensorrt-llm")]
)
def test_engines_are_known_by_other_spellings_and_plan_alike(tmp_path: Path, typed: str, meant: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA3_8B))
    asked = {"gpu": "h100", "tp": 2, "kv": "fp8", "preset": "fp8_dynamic"}
    assert plan(file, engine=typed, **asked).to_json() == plan(file, engine=meant, **asked).to_json()
