"""``quantize --stats``: scales equal what was seen, in every container's spelling, and nothing complains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from narrowcast import audit
from narrowcast.cli import main
from narrowcast.errors import UsageError
from narrowcast.jobs.quantize import plan, quantize
from narrowcast.jobs.stats import Stats
from narrowcast.runtime.walk import Running
from narrowcast.studies.calibrate import calibrate
from studies.calibrated_toys import bf16, llama, mixture, texts

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
F32 = np.float32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Stats, str]:
    """A bf16 Llama, the file of its statistics, what is in it, and the text that ran."""
    folder = tmp_path_factory.mktemp("made")
    model = bf16(llama(folder / "plain"), folder / "model")
    text = texts(folder, 60)[0]
    done = calibrate(model, folder / "stats.safetensors", [text], context=64)
    return model, done.out, done.stats, text


def tensors(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def silent(folder: Path, parent: Path) -> None:
    """No rule of the audit has anything against the result."""
    found = [one for one in audit(folder, against=parent).open_findings if one.severity != "info"]
    assert not found, found


@pytest.mark.parametrize(
    ("container", "suffix", "shape"),
    [("compressed-tensors", ".input_scale", (1,)), ("modelopt", ".input_scale", ()), ("fp8", ".input_scale", ()),
     ("quark", ".input_scale", ())],
)  # fmt: skip
def test_static_fp8_inputs(
    made: tuple[Path, Path, Stats, str], tmp_path: Path, container: str, suffix: str, shape: tuple[int, ...]
) -> None:
    model, file, stats, _ = made
    quantize(model, tmp_path / "out", "fp8", container=container, stats=file)
    found = tensors(tmp_path / "out")
    for name, seen in stats.inputs.items():
        scale = found[name + suffix]
        assert scale.dtype == torch.float32
        assert scale.numel() == 1
        assert scale.shape in (shape, (1,), ())
        assert scale.item() == F32(seen.amax) / F32(448)
    for siblings in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        assert len({found[f"model.layers.1.{name}{suffix}"].item() for name in siblings}) == 1
    silent(tmp_path / "out", model)


@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt"])
def test_static_nvfp4_inputs(made: tuple[Path, Path, Stats, str], tmp_path: Path, container: str) -> None:
    """The outer scale is amax / 2688, stored as itself by ModelOpt and as its divisor by compressed-tensors."""
    model, file, stats, _ = made
    quantize(model, tmp_path / "out", "nvfp4", container=container, stats=file)
    found = tensors(tmp_path / "out")
    for name, seen in stats.inputs.items():
        multiplier = F32(np.float64(F32(seen.amax)) / 2688)
        if container == "modelopt":
            assert found[f"{name}.input_scale"].item() == multiplier
            assert found[f"{name}.input_scale"].shape == ()
        else:
            divisor = F32(found[f"{name}.input_global_scale"].item())
            assert found[f"{name}.input_global_scale"].shape == (1,)
            assert F32(1) / divisor == multiplier or divisor == F32(1) / multiplier
            assert abs(np.float64(divisor) - 2688 / seen.amax) <= 3 * 2.0**-23 * 2688 / seen.amax
    silent(tmp_path / "out", model)


@pytest.mark.parametrize(
    ("preset", "container", "names", "shape"),
    [
        ("fp8+kv8", "compressed-tensors", (".k_scale", ".v_scale"), (1,)),
        ("fp8_dynamic+kv8", "compressed-tensors", (".k_scale", ".v_scale"), (1,)),
        ("fp8_dynamic+kv8_head", "compressed-tensors", (".k_scale", ".v_scale"), (2, 1, 1)),
        ("nvfp4+kv8", "modelopt", (".k_proj.k_scale", ".v_proj.v_scale"), ()),
        ("nvfp4+kvnv4", "modelopt", (".k_proj.k_scale", ".v_proj.v_scale"), ()),
        ("fp8+kv8", "quark", (".k_proj.output_scale", ".v_proj.output_scale"), ()),
        ("fp8+kv8", "fp8", (".k_scale", ".v_scale"), (1,)),
    ],
)
def test_scales_of_the_cache(
    made: tuple[Path, Path, Stats, str], tmp_path: Path, preset: str, container: str, names: tuple[str, str],
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    model, file, stats, _ = made
    quantize(model, tmp_path / "out", preset, container=container, stats=file)
    found = tensors(tmp_path / "out")
    for path, both in stats.caches.items():
        for which, name in zip("kv", names, strict=True):
            scale = found[path + name]
            assert scale.dtype == torch.float32
            assert scale.shape == shape
            seen = both[which].channels if preset.endswith("head") else F32([both[which].amax])
            assert scale.reshape(-1).tolist() == (seen / F32(448)).tolist()
    silent(tmp_path / "out", model)


def test_what_the_configs_say_of_the_cache(made: tuple[Path, Path, Stats, str], tmp_path: Path) -> None:
    model, file, _, _ = made
    quantize(model, tmp_path / "a", "fp8_dynamic+kv8_head", stats=file)
    scheme = config(tmp_path / "a")["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "attn_head")
    quantize(model, tmp_path / "b", "nvfp4+kv8", container="modelopt", stats=file)
    assert config(tmp_path / "b")["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    beside = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())
    assert beside["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_transformers_loads_the_scales(made: tuple[Path, Path, Stats, str], tmp_path: Path) -> None:
    model, file, stats, _ = made
    quantize(model, tmp_path / "out", "fp8+kv8", stats=file)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    down = loaded.model.layers[1].mlp.down_proj
    amax = stats.inputs["model.layers.1.mlp.down_proj"].amax
    assert float(down.input_scale) == pytest.approx(amax / 448, rel=2.0**-8)  # it keeps scales in bf16
    with torch.inference_mode():
        assert torch.isfinite(loaded(torch.arange(16)[None]).logits).all()


def test_a_static_scale_clips_what_exceeds_it(made: tuple[Path, Path, Stats, str], tmp_path: Path) -> None:
    """The clipped inputs of the first layer are those of the parent beyond scale · 448, counted one by one."""
    model, file, stats, text = made
    quantize(model, tmp_path / "out", "fp8", stats=file, stat="p90")
    name = "model.layers.0.self_attn.q_proj"
    limit = F32(F32(stats.inputs[name].at("p90")) / F32(448)) * F32(448)
    ids = transformers.AutoTokenizer.from_pretrained(model)(Path(text).read_text()).input_ids
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    inputs: list[torch.Tensor] = []
    own.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda module, given: inputs.append(given[0])
    )
    with torch.inference_mode():
        own(torch.tensor([ids]))
    beyond = int((inputs[0].float().abs() > float(limit)).sum())
    with Running.open(tmp_path / "out") as run:
        layer = run.layer(0)
        run.step(layer, 0, run.begin(torch.tensor(ids)))
        seen = layer.get_submodule("self_attn.q_proj").seen
    assert beyond > 0
    assert seen.clipped == beyond
    assert seen.elements == inputs[0].numel()


def test_experts_of_a_layer_share_a_scale(tmp_path: Path) -> None:
    model = bf16(mixture(tmp_path / "plain"), tmp_path / "model")
    stats = calibrate(model, tmp_path / "stats", texts(tmp_path, 30), context=64).stats
    done = quantize(model, tmp_path / "out", "nvfp4", container="modelopt", stats=tmp_path / "stats")
    found = tensors(tmp_path / "out")
    at = "model.layers.0.mlp.experts"
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        scales = {found[f"{at}.{e}.{leaf}.input_scale"].item() for e in range(8)}
        largest = max(stats.inputs[f"{at}.{e}.{leaf}"].amax for e in range(8))
        assert scales == {F32(np.float64(F32(largest)) / 2688).item()}
    assert any("fewer than 16 tokens" in note for note in done.plan.fallbacks)
    silent(tmp_path / "out", model)


def test_statistics_of_another_model_are_refused(made: tuple[Path, Path, Stats, str], tmp_path: Path) -> None:
    _, file, _, _ = made
    other = bf16(llama(tmp_path / "plain", seed=3), tmp_path / "other")
    with pytest.raises(UsageError, match="statistics of another model"):
        plan(other, tmp_path / "out", "fp8", stats=file)


@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "w4a16+kv8", "fp8_dynamic+kv8_head"])
def test_without_statistics_the_way_to_them_is_named(
    made: tuple[Path, Path, Stats, str], tmp_path: Path, preset: str
) -> None:
    with pytest.raises(UsageError, match="needs calibration statistics") as refused:
        plan(made[0], tmp_path / "out", preset)
    assert "narrowcast calibrate" in str(refused.value)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[[rule]]\nmatch = "re:.*_proj"\npreset = "{preset}"\n')
    with pytest.raises(UsageError, match="narrowcast calibrate"):
        plan(made[0], tmp_path / "out", recipe=recipe)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"preset": "w4a16"}, "nothing takes a scale"),
        ({"preset": "fp8", "stat": "p0"}, "no such statistic"),
        ({"preset": "fp8+kv8_head", "stat": "ema"}, "single heads"),
        ({"preset": "fp8+kv8_head", "container": "modelopt"}, "no KV cache of the scheme fp8_head"),
        ({"preset": "w4a16+kv8", "container": "gptq"}, "no KV cache of the scheme fp8"),
        ({"preset": "fp8", "stats": None, "stat": "ema"}, "there are none"),
    ],
)
def test_what_cannot_be_asked(
    made: tuple[Path, Path, Stats, str], tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    model, file, _, _ = made
    with pytest.raises(UsageError, match=said):
        plan(model, tmp_path / "out", **{"stats": file, **options})


def test_a_recipe_with_two_kinds_of_cache(made: tuple[Path, Path, Stats, str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('default = "fp8+kv8"\n[[rule]]\nmatch = "re:.*mlp.*"\npreset = "fp8+kv8_head"\n')
    with pytest.raises(UsageError, match="one KV cache"):
        plan(made[0], tmp_path / "out", recipe=recipe, stats=made[1])


def test_other_statistics_are_another_job(made: tuple[Path, Path, Stats, str], tmp_path: Path) -> None:
    """What another run left is not gone on with when the scales would differ."""
    model, file, _, _ = made
    jobs = [
        plan(model, tmp_path / "out", "fp8+kv8", stats=file, stat=stat).job()
        for stat in ("amax", "p90", "amax")
    ]
    assert jobs[0] == jobs[2] != jobs[1]


def test_the_command_and_the_record(
    made: tuple[Path, Path, Stats, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file, stats, _ = made
    asked = ["quantize", str(model), str(tmp_path / "out"), "--preset", "nvfp4+kv8", "--stats", str(file)]
    assert main([*asked, "--stat", "p99.9", "--container", "modelopt", "--quiet"]) == 0
    said = json.loads((tmp_path / "out" / "narrowcast.json").read_text())["calibration"]
    assert said["stat"] == "p99.9"
    assert said["kv"] == "fp8"
    assert said["texts"][0] == {"sha256": stats.texts[0].sha256, "tokens": 60, "context": 64}
    scale = tensors(tmp_path / "out")["model.layers.0.mlp.down_proj.input_scale"].item()
    seen = stats.inputs["model.layers.0.mlp.down_proj"]
    assert seen.at("p99.9") < seen.amax
    assert scale == F32(np.float64(F32(seen.at("p99.9"))) / 2688)
