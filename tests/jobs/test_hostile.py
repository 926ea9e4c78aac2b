"""Sources that lie, contradict themselves or are quantized already: refused before a byte is written, by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import toys
from narrowcast.errors import CheckpointError, InputError, NarrowcastError, NonFiniteError, UsageError
from narrowcast.jobs.quantize import plan, quantize, run

LAYER = "model.layers.0"
Q, K, V = (f"{LAYER}.self_attn.{leaf}_proj" for leaf in "qkv")
UP, DOWN = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"


def small(folder: Path, *, shards: int = 1, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """One layer of a Llama; ``tensors`` replace or join its own (None removes one)."""
    state = toys.weights(toys.llama_shapes(layers=1)) | tensors
    kept = {name: value for name, value in state.items() if value is not None}
    return toys.write(folder, kept, toys.llama_config(layers=1) | (config or {}), shards)


def names(out: Path) -> set[str]:
    found: set[str] = set()
    for shard in out.glob("*.safetensors"):
        with safe_open(shard, "np") as file:
            found |= set(file.keys())
    return found


def ignored(out: Path) -> list[str]:
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    found: list[str] = block["ignore"]
    return found


def flags(refusal: NarrowcastError) -> list[str]:
    """The patterns of the ``--ignore`` flags that a remedy offers."""
    words = str(refusal.remedy).replace(",", " ").split()
    return [words[i + 1].strip("'") for i, word in enumerate(words) if word == "--ignore"]


# --- config.json


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5), ("architectures", "LlamaForCausalLM"), ("architectures", [1]), ("model_type", ["llama"]),
        ("quantization_config", "fp8"), ("quantization_config", [1]), ("compression_config", 4), ("text_config", []),
    ],
)  # fmt: skip
def test_a_config_of_wrong_kinds_is_refused_by_key(tmp_path: Path, key: str, value: object) -> None:
    model = small(tmp_path / "m", config={key: value})
    with pytest.raises(CheckpointError, match=key) as refusal:
        plan(model, tmp_path / "out", "fp8_dynamic")
    assert str(refusal.value.where).endswith("config.json")


@pytest.mark.parametrize(
    "empty", [{"quantization_config": None}, {"quantization_config": {}}, {"architectures": None}]
)
def test_empty_values_of_a_config_say_nothing(tmp_path: Path, empty: dict[str, Any]) -> None:
    plan(small(tmp_path / "m", config=empty), tmp_path / "out", "fp8_dynamic")


# --- quantized already


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
    ],
)
def test_a_quantized_source_is_known_by_its_config(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="quantized already"):
        plan(small(tmp_path / "m", config=config), tmp_path / "out", "nvfp4a16")


PIECES: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "gptq": {".qweight": ("i4", (16, 128)), ".qzeros": ("i4", (1, 16)), ".scales": ("f2", (1, 128))},
    "fp8 blocks": {".weight": ("u1", (128, 128)), ".weight_scale_inv": ("f4", (1, 1))},
    "packed": {".weight_packed": ("i4", (128, 16)), ".weight_scale": ("f4", (128, 1)), ".weight_shape": ("i8", (2,))},
    "modelopt": {".weight": ("u1", (128, 64)), ".weight_scale": ("u1", (128, 8)), ".weight_scale_2": ("f4", ())},
    "bitsandbytes": {".weight": ("u1", (8192, 1)), ".weight.absmax": ("f4", (256,))},
    "llm.int8": {".weight": ("i1", (128, 128)), ".SCB": ("f4", (128,))},
    "mxfp4 blocks": {"_blocks": ("u1", (4, 64, 1, 16)), "_scales": ("u1", (4, 64, 1))},
}  # fmt: skip


@pytest.mark.parametrize("method", list(PIECES))
def test_a_quantized_source_is_known_by_its_tensors(tmp_path: Path, method: str) -> None:
    """Old files have no quantization_config; the layers beside the quantized ones must not be taken for the model."""
    pieces: dict[str, Any] = {
        f"{DOWN}{end}": np.ones(shape, kind) for end, (kind, shape) in PIECES[method].items()
    }
    model = small(tmp_path / "m", **{f"{DOWN}.weight": None} | pieces)
    with pytest.raises(InputError, match="quantized already") as refusal:
        plan(model, tmp_path / "out", "fp8_dynamic")
    assert DOWN in str(refusal.value)


def test_an_fp8_matrix_without_scales_is_refused_by_name(tmp_path: Path) -> None:
    """Engines read such a matrix with a scale of 1.0; what its scale was cannot be guessed."""
    fp8 = np.ones((128, 128), ml_dtypes.float8_e4m3fn)
    model = tmp_path / "m"
    small(model, **{f"{LAYER}.self_attn.o_proj.weight": fp8})
    with pytest.raises(InputError, match="no scale") as refusal:
        plan(model, tmp_path / "out", "fp8_dynamic")
    assert "self_attn.o_proj" in str(refusal.value)


# --- shapes and names


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)])
def test_empty_matrices_are_carried(tmp_path: Path, shape: tuple[int, int]) -> None:
    model = small(tmp_path / "m", **{f"{DOWN}.weight": np.ones(shape, ml_dtypes.bfloat16)})
    for preset in ("fp8_per_tensor", "w4a16_asym", "nvfp4a16"):
        quantize(model, tmp_path / preset, preset)
        assert f"{DOWN}.weight" in names(tmp_path / preset)
        assert f"{UP}.weight_scale" in names(tmp_path / preset)


# Columns must fill whole groups, the smallest that a preset falls back to; a scale per row or block takes any width.
MULTIPLES = {"nvfp4a16": 16} | {p: 32 for p in toys.PRESETS if p.startswith(("mx", "w"))}


@pytest.mark.parametrize("preset", toys.PRESETS)
@pytest.mark.parametrize("shape", [(1, 128), (1, 1), (3, 5), (129, 130)])
def test_odd_shapes_are_quantized_or_refused_with_what_would_do(
    tmp_path: Path, preset: str, shape: tuple[int, int]
) -> None:
    model = toys.write(tmp_path / "m", toys.weights({f"{DOWN}.weight": shape}), toys.llama_config(layers=1))
    multiple = MULTIPLES.get(preset, 1)
    if shape[1] % multiple == 0:
        quantize(model, tmp_path / "out", preset)
        return
    with pytest.raises(UsageError, match=rf"a multiple of {multiple}\b") as refusal:
        quantize(model, tmp_path / "out", preset)
    assert refusal.value.where == DOWN
    wide = toys.weights({f"{DOWN}.weight": (shape[0], multiple)})
    plan(toys.write(tmp_path / "wide", wide, toys.llama_config()), tmp_path / "out", preset)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_source_tensor_with_the_name_of_a_result_is_refused_before_writing(
    tmp_path: Path, shards: int
) -> None:
    """In whichever shard it lies: two shards with one name would be found out only at the very end."""
    stacked = toys.weights(toys.moe_shapes("qwen3_moe"))
    stacked[f"{LAYER}.mlp.experts.0.gate_proj.weight"] = np.ones((32, 32), ml_dtypes.bfloat16)
    model = toys.write(tmp_path / "m", stacked, toys.moe_config("qwen3_moe"), shards)
    with pytest.raises(InputError, match=r"experts\.0\.gate_proj\.weight") as refusal:
        plan(model, tmp_path / "out", "fp8_dynamic")
    assert f"{LAYER}.mlp.experts.gate_up_proj" in str(refusal.value)
    plan(model, tmp_path / "out", "fp8_dynamic", ignore=flags(refusal.value))


def test_names_that_are_no_unicode_are_a_fault_of_the_source(tmp_path: Path) -> None:
    model = small(tmp_path / "m")
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"model.norm.weight"', b'"a\\ud800b"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(InputError, match="Unicode"):
        plan(model, tmp_path / "out", "fp8_dynamic")


def test_names_of_any_script_and_length_go_through(tmp_path: Path) -> None:
    odd = ("модель.слой.0.вверх", "a/b/../c", "x" * 5000, "quo\"te 'it", "re:.*", "Linear")
    model = tmp_path / "m"
    model.mkdir()
    save_file(toys.weights({f"{name}.weight": (16, 128) for name in odd}), model / "model.safetensors")
    (model / "config.json").write_text("{}")
    result = quantize(model, tmp_path / "out", "nvfp4a16")
    assert set(result.tensors) == set(odd)


# --- NaN, and remedies that work


def poisoned(folder: Path, name: str, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    tensors[name].reshape(-1)[1] = np.nan
    return toys.write(folder, tensors, config)


def mixtral() -> tuple[dict[str, Any], dict[str, Any]]:
    shapes = {
        f"{LAYER}.block_sparse_moe.experts.{expert}.{leaf}.weight": (32, 32)
        for expert in range(3)
        for leaf in ("w1", "w2", "w3")
    }
    shapes |= {f"{name}.weight": (32, 32) for name in (Q, K, V)}
    return toys.weights(shapes), {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}


def stacked(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return toys.weights(toys.moe_shapes(family)), toys.moe_config(family)


NAN_CASES = {
    "fused": (f"{K}.weight", lambda: (toys.weights(toys.llama_shapes(layers=1)), toys.llama_config(layers=1))),
    "stack": (f"{LAYER}.mlp.experts.gate_up_proj", lambda: stacked("qwen3_moe")),
    "stack with biases": (f"{LAYER}.mlp.experts.down_proj", lambda: stacked("gpt_oss")),
    "one expert": (f"{LAYER}.block_sparse_moe.experts.1.w1.weight", mixtral),
}  # fmt: skip


@pytest.mark.parametrize("case", list(NAN_CASES))
def test_what_a_nan_refusal_advises_works(tmp_path: Path, case: str) -> None:
    """A layer can only be kept together with those that engines run as one with it."""
    name, make = NAN_CASES[case]
    model = poisoned(tmp_path / "m", name, *make())
    with pytest.raises(NonFiniteError, match="1 NaN") as refusal:
        quantize(model, tmp_path / "out", "fp8_dynamic")
    assert flags(refusal.value)
    quantize(model, tmp_path / "out", "fp8_dynamic", ignore=flags(refusal.value))


@pytest.mark.parametrize("case", list(NAN_CASES))
def test_copying_non_finite_layers_is_the_same_as_ignoring_them(tmp_path: Path, case: str) -> None:
    name, make = NAN_CASES[case]
    model = poisoned(tmp_path / "m", name, *make())
    with pytest.raises(NonFiniteError) as refusal:
        quantize(model, tmp_path / "refused", "fp8_dynamic")
    quantize(model, tmp_path / "asked", "fp8_dynamic", ignore=flags(refusal.value))
    quantize(model, tmp_path / "copied", "fp8_dynamic", nonfinite="copy")
    assert ignored(tmp_path / "asked") == ignored(tmp_path / "copied")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "asked" / file).read_bytes() == (tmp_path / "copied" / file).read_bytes()
    assert name in names(tmp_path / "copied")


def test_what_other_refusals_advise_works(tmp_path: Path) -> None:
    wide = small(tmp_path / "m", **{f"{K}.weight": np.ones((64, 128), np.float64)})
    with pytest.raises(InputError, match="F64") as refusal:
        plan(wide, tmp_path / "out", "fp8_dynamic")
    assert set(flags(refusal.value)) == {Q, K, V}
    plan(wide, tmp_path / "out", "fp8_dynamic", ignore=flags(refusal.value))
    ragged = toys.moe(tmp_path / "ragged", "qwen3_moe", hidden=32, inner=24)
    with pytest.raises(UsageError, match="cannot divide") as refused:
        plan(ragged, tmp_path / "out", "mxfp4")
    plan(ragged, tmp_path / "out", "mxfp4", ignore=flags(refused.value))


def test_overflow_of_the_rounded_value_is_told_as_what_it_is(tmp_path: Path) -> None:
    """3.3e38 = 1.94 · 2^127 rounds to 2^128 on an FP4 grid with power-of-two scales, and fp32 ends below that."""
    model = small(tmp_path / "m", **{f"{DOWN}.weight": np.full((128, 352), 3.3e38, ml_dtypes.bfloat16)})
    with pytest.raises(InputError, match=r"too large") as refusal:
        quantize(model, tmp_path / "out", "mxfp4a16")
    assert DOWN in str(refusal.value)
    assert not list(tmp_path.glob("out*"))


# --- the plan and the moment


def test_a_plan_is_for_the_source_that_it_saw(tmp_path: Path) -> None:
    """The same names and sizes in another dtype would be read as garbage."""
    model = small(tmp_path / "m")
    settled = plan(model, tmp_path / "out", "int8")
    toys.llama(model, dtype="fp16", layers=1)
    with pytest.raises(InputError, match="changed"):
        run(settled)
    assert not list(tmp_path.glob("out*"))


def test_a_plan_outlives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path / "m")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    settled = plan("m", "out", "int8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(settled).out == tmp_path / "out"
    assert (tmp_path / "out" / "config.json").is_file()


def test_arguments_of_other_kinds(tmp_path: Path) -> None:
    model = small(tmp_path / "m")
    alike = [
        plan(model, tmp_path / "out", "int8", ignore=ignore)
        for ignore in ("re:.*mlp.*", ["re:.*mlp.*"], (text for text in ["re:.*mlp.*"]))
    ]
    assert len({len(settled.units) for settled in alike}) == 1
    for workers in (0, -1):
        with pytest.raises(UsageError, match="workers"):
            plan(model, tmp_path / "out", "int8", workers=workers)
    with pytest.raises(UsageError, match="one file"):
        plan(model / "model.safetensors", tmp_path / "out", "int8")


def test_forecast_of_a_single_shard_of_any_name(tmp_path: Path) -> None:
    """Loaders find model.safetensors alone; any other name needs an index, which takes bytes."""
    model = small(tmp_path / "m")
    os.rename(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    settled = plan(model, tmp_path / "out", "int8")
    run(settled)
    made = [p for p in (tmp_path / "out").iterdir() if p.name not in ("README.md", "narrowcast.json")]
    assert sum(p.stat().st_size for p in made) == settled.forecast_bytes


def test_planning_time_does_not_grow_with_the_square_of_the_layers(tmp_path: Path) -> None:
    """44,000 expert matrices in one model, and a recipe that gives them a scheme of their own."""
    from narrowcast.containers.targets import targets

    experts = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(58) for e in range(256)]
    others = [f"model.layers.{i}.self_attn.q_proj" for i in range(58)]
    assert targets(experts, [*experts, *others]) == [r"re:^model\.layers\.\d+\.mlp\.experts\.\d+\.up_proj$"]
    assert targets(experts[1:], [*experts, *others]) == experts[1:]


# --- recipes and patterns


DEEP = 5000
BAD_RECIPES = {
    "yaml that holds itself": ("r.yaml", "quant_stage: &a\n  x_stage: *a\n"),
    "deep yaml": ("r.yaml", "a: " + "[" * DEEP + "]" * DEEP),
    "deep toml": ("r.toml", "default = " + "[" * DEEP + "]" * DEEP),
    "a regular expression too large": ("r.toml", '[[rule]]\nmatch = "re:a{99999999999}"\nkeep = true\n'),
    "a regular expression too deep": ("r.toml", f'[[rule]]\nmatch = "re:{"(" * DEEP}{")" * DEEP}"\nkeep = true\n'),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD_RECIPES))
def test_recipes_that_exhaust_a_parser(tmp_path: Path, case: str) -> None:
    name, text = BAD_RECIPES[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as refusal:
        plan(small(tmp_path / "m"), tmp_path / "out", recipe=tmp_path / name)
    assert name in str(refusal.value.where)


def test_names_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from narrowcast.cli import main

    model = toys.write(
        tmp_path / "m",
        toys.weights({f"a\x1b]0;title\x07{c}.weight": (64, 128) for c in "\n\r\x9b\u202e\x7f"}),
        {},
    )
    assert main(["quantize", str(model), str(tmp_path / "out"), "--preset", "int8"]) == 0
    assert main(["inspect", str(model)]) == 0
    assert (
        main(["quantize", str(model), str(tmp_path / "out2"), "--preset", "int8", "--ignore", "a\x1b"]) == 2
    )
    output = capsys.readouterr()
    for text in (output.out, output.err):
        assert all(character.isprintable() for character in text.replace("\n", ""))
    assert "title\ufffd" in output.out


@pytest.mark.parametrize("layers", [1, 3])
def test_stacks_that_cannot_be_split_are_kept_as_advised(tmp_path: Path, layers: int) -> None:
    """An unknown family's experts: all layers of them at once, with all that they bind."""
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in {
            "mlp.experts.gate_up_proj": (2, 64, 32),
            "mlp.experts.down_proj": (2, 32, 32),
            "self_attn.o_proj.weight": (32, 32),
        }.items()
    }
    model = toys.write(tmp_path / "m", toys.weights(shapes), {"model_type": "new", "hidden_size": 32})
    with pytest.raises(UsageError, match="cannot be quantized as it is stored") as refusal:
        plan(model, tmp_path / "out", "int8")
    plan(model, tmp_path / "out", "int8", ignore=flags(refusal.value))


def test_a_group_torn_apart_is_told_how_to_stay_whole(tmp_path: Path) -> None:
    model = small(tmp_path / "m")
    with pytest.raises(UsageError, match="fused group differs") as refusal:
        plan(model, tmp_path / "out", "int8", ignore=[K])
    assert set(flags(refusal.value)) == {Q, K, V}
    plan(model, tmp_path / "out", "int8", ignore=flags(refusal.value))
