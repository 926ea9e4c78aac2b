"""A model from headers, from its config with a preset, from a quantized config: the same groups, to the byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toys
from containers.test_matrix import claims
from narrowcast.containers import containers
from narrowcast.errors import CheckpointError, NarrowcastError, UsageError
from narrowcast.hardware.gpus import gpus
from narrowcast.jobs.quantize import plan, run
from narrowcast.model.roles import Role
from narrowcast.serving.loading import load
from narrowcast.serving.memory import memory
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.traffic import streamed
from narrowcast.serving.weighed import load_weighed
from narrowcast.store.checkpoint import Checkpoint

DEMO = Path(__file__).parents[2] / "demo-output"
UPSTREAM = sorted(
    path.parent for path in (Path(__file__).parents[1] / "containers" / "upstream").glob("*/config.json")
)
GGUF = Path(__file__).parents[1] / "containers" / "gguf_upstream"
WRITTEN = [
    name for name, row in containers.items() if row.spelling is not None and name not in ("plain", "mxfp4")
]
# Methods whose configs say how each layer is stored.
TOLD = ("compressed-tensors", "modelopt", "gptq", "awq", "fp8", "fbgemm-fp8", "mxfp4")


def groups(served: Served) -> list[tuple[Any, ...]]:
    """What a plan sees of the groups, in one order."""
    return sorted(
        (g.matrix.name, g.matrix.shape, g.matrix.layers, g.matrix.experts, g.scheme, g.nbytes, g.matrix.split)
        for g in served.groups
    )


def payload(folder: Path) -> int:
    """Bytes of all tensors of a checkpoint."""
    with Checkpoint.open(folder) as checkpoint:
        return sum(entry.nbytes for entry in checkpoint.entries.values())


def mixture(folder: Path, *, experts: int = 4, one_by_one: bool = False, **more: Any) -> Path:
    """A Qwen3-MoE with every tensor that its family has, experts stacked or one by one."""
    hidden = inner = 128
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            shapes[f"{at}.self_attn.{name}.weight"] = (rows, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, 128)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (hidden,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{at}.self_attn.{name}.weight"] = (32,)
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        if one_by_one:
            for e in range(experts):
                for name in ("gate_proj", "up_proj"):
                    shapes[f"{at}.mlp.experts.{e}.{name}.weight"] = (inner, hidden)
                shapes[f"{at}.mlp.experts.{e}.down_proj.weight"] = (hidden, inner)
        else:
            shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, inner)
    config = {
        **toys.llama_config(), "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": 2, "head_dim": 32, **more,
    }  # fmt: skip
    return toys.write(folder, toys.weights(shapes), config)


@pytest.mark.parametrize(
    ("container", "preset"),
    [(c, p) for c in WRITTEN for p in toys.PRESETS if claims(c, p)],
)
def test_the_forecast_is_what_quantize_writes(tmp_path: Path, container: str, preset: str) -> None:
    model = toys.llama(tmp_path / "model", hidden=256, inner=384, head=True)
    out = tmp_path / "out"
    run(plan(model, out, preset, container=container))
    found = load(out)
    assert found.container == container
    assert found.origin == "headers"
    assert found.nbytes == payload(out)
    for ahead in (
        load(model, preset=preset, container=container),
        load(model / "config.json", preset=preset, container=container),
    ):
        assert ahead.preset == preset
        assert ahead.nbytes == found.nbytes
        assert groups(ahead) == groups(found)
    if container in TOLD:
        (tmp_path / "alone").mkdir()
        for file in out.glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, tmp_path / "alone")
        alone = load(tmp_path / "alone")
        assert (alone.container, alone.origin) == (container, "config")
        if (container, preset) == ("awq", "w4a16"):  # that all zero points are 8 is in the words alone
            assert [one[5] for one in groups(alone)] == [one[5] for one in groups(found)]
        elif (container, preset) == (
            "modelopt",
            "w4a16",
        ):  # ModelOpt's own scales are F32, ours the source's BF16
            scales = sum(g.matrix.parameters // 128 for g in found.groups if g.linear is not None)
            assert alone.nbytes == found.nbytes + 2 * scales
        else:
            assert groups(alone) == groups(found)


def test_widths_that_128_does_not_divide_take_smaller_groups(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", hidden=192, inner=352)
    run(plan(model, tmp_path / "out", "w4a16"))
    found = load(tmp_path / "out")
    assert {g.scheme for g in found.groups} == {"bf16", "int4_g64", "int4_g32"}
    assert groups(load(model, preset="w4a16")) == groups(found)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("preset", ["fp8_dynamic", "nvfp4a16", "w4a16"])
def test_experts_count_as_experts_stacked_or_not(tmp_path: Path, preset: str, one_by_one: bool) -> None:
    model = mixture(tmp_path / "model", one_by_one=one_by_one)
    wide = load(model)
    assert wide.nbytes == payload(model)
    assert wide.notes == ()
    experts = {g.matrix.leaf: g.matrix for g in wide.groups if g.matrix.role is Role.EXPERT}
    assert {leaf: (m.layers, m.experts, m.active, m.split) for leaf, m in experts.items()} == {
        "gate_proj": (2, 4, 2, "column"), "up_proj": (2, 4, 2, "column"), "down_proj": (2, 4, 2, "row"),
    }  # fmt: skip
    run(plan(model, tmp_path / "out", preset))
    found = load(tmp_path / "out")
    assert groups(load(model, preset=preset)) == groups(found)
    assert groups(load(model / "config.json", preset=preset)) == groups(found)
    assert streamed(found) < found.nbytes


def test_a_stack_of_gpt_oss_is_one_matrix_of_each_expert(tmp_path: Path) -> None:
    model = toys.moe(tmp_path / "model", "gpt_oss", hidden=64, inner=64)
    config = json.loads((model / "config.json").read_text())
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": 64, "attention_bias": False,
            "layer_types": ["sliding_attention"], "sliding_window": 128}  # fmt: skip
    (model / "config.json").write_text(json.dumps({**config, **more}))
    found = load(model)
    stack = next(g for g in found.groups if g.matrix.leaf == "gate_up_proj")
    assert (stack.matrix.shape, stack.matrix.experts, stack.matrix.active) == ((128, 64), 4, 2)
    assert stack.nbytes == 4 * (128 * 64 + 128) * 2  # with its bias
    assert found.nbytes == payload(model)
    ahead = load(model, preset="mxfp4a16")
    assert ahead.nbytes == load(model / "config.json", preset="mxfp4a16").nbytes + (
        found.nbytes - load(model / "config.json").nbytes  # the toy has no norms and sinks
    )


@pytest.mark.skipif(not (DEMO / "smollm2-bf16").is_dir(), reason="make demo has not made demo-output")
@pytest.mark.parametrize("preset", ["fp8_dynamic", "nvfp4a16", "w4a16"])
def test_a_real_model_is_forecast_to_the_byte(preset: str) -> None:
    if not (DEMO / preset).is_dir():
        pytest.skip(f"make demo has not made {preset}")
    found = load(DEMO / preset)
    assert found.nbytes == payload(DEMO / preset)
    assert groups(load(DEMO / "smollm2-bf16", preset=preset)) == groups(found)
    assert groups(load(DEMO / "smollm2-bf16" / "config.json", preset=preset)) == groups(found)
    assert groups(load(DEMO / preset / "config.json")) == groups(found)
    assert found.geometry.parameters == 134_515_008


def test_a_tied_head_that_is_stored_counts_once(tmp_path: Path) -> None:
    shapes = toys.llama_shapes(head=True)
    model = toys.write(tmp_path / "model", toys.weights(shapes), toys.llama_config(tie_word_embeddings=True))
    found = load(model)
    assert found.nbytes == payload(model) - 64 * 128 * 2
    assert Role.LM_HEAD not in {g.matrix.role for g in found.groups}
    assert "engines load one of them" in found.notes[0]


def test_biases_count_with_their_matrices(tmp_path: Path) -> None:
    shapes = toys.llama_shapes(hidden=256, inner=384)
    for name in list(shapes):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name.replace("weight", "bias")] = (shapes[name][0],)
    config = toys.llama_config(hidden=256, inner=384, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    model = toys.write(tmp_path / "model", toys.weights(shapes), config)
    run(plan(model, tmp_path / "out", "fp8_dynamic"))
    found = load(tmp_path / "out")
    q = next(g for g in found.groups if g.matrix.leaf == "q_proj")
    assert (q.matrix.bias, q.nbytes) == (256, 2 * (256 * 256 + 4 * 256 + 2 * 256))
    assert found.notes == ()
    for ahead in (load(model, preset="fp8_dynamic"), load(model / "config.json", preset="fp8_dynamic")):
        assert groups(ahead) == groups(found)
    assert groups(load(tmp_path / "out" / "config.json")) == groups(found)


@pytest.mark.parametrize(
    ("container", "preset"),
    [("gptq", "w4a16"), ("awq", "w4a16_asym"), ("fp8", "fp8_block"), ("modelopt", "fp8_dynamic"),
     ("compressed-tensors", "nvfp4a16")],
)  # fmt: skip
def test_configs_name_what_is_kept(tmp_path: Path, container: str, preset: str) -> None:
    model = toys.llama(tmp_path / "model", hidden=256, inner=384)
    keep = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    ]
    run(plan(model, tmp_path / "out", preset, container=container, ignore=keep))
    found = load(tmp_path / "out")
    assert {g.matrix.layers for g in found.groups if g.matrix.leaf == "q_proj"} == {1}
    assert groups(load(tmp_path / "out" / "config.json")) == groups(found)


def test_mixed_and_ignored_layers_are_groups_of_their_own(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", hidden=256, inner=384)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'default = "fp8_dynamic"\n[[rule]]\nmatch = \'re:.*\\.0\\.mlp\\..*\'\npreset = "w4a16"\n'
        '[[rule]]\nmatch = "model.layers.1.self_attn.o_proj"\nkeep = true\n'
    )
    run(plan(model, tmp_path / "out", recipe=recipe))
    found = load(tmp_path / "out")
    by = {(g.matrix.leaf, g.scheme): g.matrix.layers for g in found.groups}
    assert by["down_proj", "int4_g128"] == 1
    assert by["down_proj", "fp8_channel"] == 1
    assert by["o_proj", "bf16"] == 1
    assert by["o_proj", "fp8_channel"] == 1
    assert groups(load(tmp_path / "out" / "config.json")) == groups(found)


def test_a_family_that_is_not_known_is_loaded_without_a_cache(tmp_path: Path) -> None:
    config = toys.llama_config(model_type="unheard_of")
    model = toys.write(tmp_path / "model", toys.weights(toys.llama_shapes()), config)
    found = load(model)
    assert found.nbytes == payload(model)
    assert found.geometry.attention == ()
    assert "not known" in found.notes[0]
    assert {g.matrix.leaf: g.matrix.split for g in found.groups} == {
        "embed_tokens": "column", "q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row",
        "gate_proj": "column", "up_proj": "column", "down_proj": "row",
    }  # fmt: skip


def test_one_file_of_tensors_is_loaded_too(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    found = load(model / "model.safetensors")
    assert (found.nbytes, found.geometry.layers) == (payload(model), 2)


def test_layers_that_are_missing_are_an_error_and_other_differences_a_note(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match="4, as the config says"):
        load(model)
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    assert "parameters" in load(model).notes[0]


def test_a_preset_on_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    run(plan(model, tmp_path / "out", "fp8_dynamic"))
    for place in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.raises(UsageError, match=r"quantized already(.|\n)*parent"):
            load(place, preset="w4a16")


def test_what_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a config nor weights"):
        load(tmp_path / "empty")
    with pytest.raises(UsageError, match="no such model"):
        load(tmp_path / "nothing")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="need the package huggingface_hub"):
        load("owner/name")
    model = toys.llama(tmp_path / "model")
    with pytest.raises(UsageError, match="without a preset"):
        load(model, container="awq")
    with pytest.raises(UsageError, match="no preset is written as plain"):
        load(model, preset="fp8_dynamic", container="plain")


def hub(home: Path, model: str) -> subprocess.CompletedProcess[str]:
    """Load a hub id in a process whose hub cache is ``home``, offline."""
    code = (
        "from narrowcast.serving.loading import load\n"
        "from narrowcast.errors import UsageError\n"
        f"try: found = load({model!r})\n"
        "except UsageError as error: print(error)\n"
        "else: print(found.name, found.origin, found.nbytes)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip


def test_a_hub_id_gives_its_config_from_the_hubs_own_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "hub" / "models--owner--name"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(toys.llama_config()))
    alone = load(snapshot / "config.json").nbytes
    assert hub(tmp_path, "owner/name").stdout.split() == ["owner/name", "config", str(alone)]
    toys.llama(snapshot)
    assert hub(tmp_path, "owner/name").stdout.split() == ["owner/name", "headers", str(payload(snapshot))]
    assert "the hub did not give this model" in hub(tmp_path, "owner/other").stdout


def test_names_and_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such model"):
        load_weighed("x" * 5000)
    nothing = tmp_path / "nothing.safetensors"
    nothing.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="no matrix"):
        load_weighed(nothing)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(NarrowcastError):
        load_weighed(tmp_path / "pipe.json")
    (tmp_path / "config.json").write_text(json.dumps({**toys.llama_config(), "architectures": 3}))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(NarrowcastError):
        load_weighed(tmp_path)
    with pytest.raises(CheckpointError, match="architectures"):
        load_weighed(tmp_path / "config.json")


# --- what other libraries wrote


@pytest.mark.parametrize("folder", UPSTREAM, ids=lambda folder: folder.name)
def test_headers_of_every_container_count_every_byte(folder: Path) -> None:
    """Checkpoints that auto-round, AutoAWQ, bitsandbytes, compressed-tensors, GPTQModel, ModelOpt, Quark, torchao and
    transformers wrote."""
    found = load(folder)
    assert found.nbytes == payload(folder)
    assert all(group.nbytes > 0 and group.matrix.layers > 0 for group in found.groups)
    assert found.kv_scales == (found.kv is not None)
    known = (
        found.geometry.attention and folder.name != "compressed_tensors_spinquant_w4a16"
    )  # with its rotations
    assert not known or not any("parameters" in note for note in found.notes)
    # vLLM and SGLang pad vocabularies and MXFP4 experts
    bare = memory(found, Question(gpus["l4"], engine="tensorrt-llm"))
    assert bare.total <= found.nbytes + len(bare.weights)  # each class rounded up


# What the config alone says otherwise than the files: an input's zero point, a block that ModelOpt's config has no word
# for, MX scales held in floats, transforms that lie beside the model.
OTHERWISE = ("modelopt_fp8_pb_wo", "native_fp8_block32_ue8m0", "compressed_tensors_spinquant_w4a16")


@pytest.mark.parametrize("folder", UPSTREAM, ids=lambda folder: folder.name)
def test_a_config_alone_says_the_schemes_of_the_files(folder: Path) -> None:
    found = load(folder)
    if found.container not in TOLD or found.geometry.attention == () or folder.name in OTHERWISE:
        return
    alone = load(folder / "config.json")
    linear = {(g.matrix.name, g.scheme, g.matrix.layers) for g in found.groups}
    assert {(g.matrix.name, g.scheme, g.matrix.layers) for g in alone.groups} == linear
    assert alone.kv == found.kv


@pytest.mark.parametrize(
    "file", sorted(GGUF.rglob("*.gguf")), ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_gguf_files_count_every_byte(file: Path) -> None:
    gguf = pytest.importorskip("gguf")
    found = load(file)
    tensors = gguf.GGUFReader(file).tensors
    weights = (tensor for tensor in tensors if not tensor.name.startswith("rope_"))  # tables of angles
    assert found.nbytes == sum(int(tensor.n_bytes) for tensor in weights)
    assert found.geometry.attention
    if file.stem == "q8_0":
        assert {g.scheme for g in found.groups} == {"Q8_0", "int8_g32"}


def test_a_part_that_is_not_quantized_alone_is_told_to_be_part_of_a_directory(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    run(plan(model, tmp_path / "out", "fp8_dynamic"))
    with pytest.raises(CheckpointError, match="give the directory"):
        load(tmp_path / "out" / "model.safetensors")
