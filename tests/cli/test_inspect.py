"""``narrowcast inspect``: counts recomputed with the safetensors package, quantized results, foreign methods."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import toys
from cli.running import Cli
from serving.configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA3_8B

PATH = "model.layers.0.mlp.up_proj"


def stored(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every tensor, read by the safetensors package."""
    with safe_open(folder / "model.safetensors", "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def write(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_unquantized(cli: Cli, llama: Path) -> None:
    answer = cli("inspect", llama, "--json").json
    tensors = stored(llama)
    assert answer["parameters"] == sum(math.prod(shape) for shape, _ in tensors.values())
    assert answer["tensors"] == len(tensors)
    assert answer["dtypes"] == {"BF16": {"tensors": len(tensors), "bytes": 2 * answer["parameters"]}}
    assert answer["architectures"] == ["LlamaForCausalLM"]
    assert answer["quantization"] is None
    assert answer["tied"] == [{"head": "lm_head.weight", "embedding": "model.embed_tokens.weight"}]
    assert {row["role"] for row in answer["roles"]} == {"mlp", "attention", "embedding", "norm"}
    assert {module["scheme"] for module in answer["modules"]} == {"bf16"}
    assert sum(module["bytes"] for module in answer["modules"]) == answer["bytes"]
    assert answer["oddities"] == []


@pytest.mark.parametrize(
    ("preset", "scheme"),
    [
        ("fp8_dynamic", "fp8_channel"),
        ("fp8_per_tensor", "fp8_tensor"),
        ("fp8_block", "fp8_block128"),
        ("int8", "int8_channel"),
        ("w8a16", "int8_g64"),
        ("w4a16_asym", "uint4_g64"),
        ("w4afp8", "int4_g64"),
        ("nvfp4a16", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("mxfp6a8", "mxfp6_e2m3"),
        ("mxfp8", "mxfp8_e4m3"),
    ],
)
def test_every_module_of_our_own_results(
    cli: Cli, llama: Path, tmp_path: Path, preset: str, scheme: str
) -> None:
    """The scheme comes back by name, and no parameter is lost or found in the packing."""
    assert cli("quantize", llama, tmp_path / "out", "--preset", preset, "--quiet").code == 0
    before = {m["name"]: m for m in cli("inspect", llama, "--json").json["modules"]}
    answer = cli("inspect", tmp_path / "out", "--json").json
    after = {m["name"]: m for m in answer["modules"]}
    assert answer["quantization"]["quant_method"] == "compressed-tensors"
    assert after.keys() == before.keys()
    for name, module in after.items():
        assert module["parameters"] == before[name]["parameters"]
        assert module["role"] == before[name]["role"]
    assert after[PATH]["scheme"] == scheme
    assert after["model.embed_tokens"]["scheme"] == "bf16"
    assert scheme in cli("inspect", tmp_path / "out").out


# Method, config, tensors of one 64x128 matrix as the method stores it, and the scheme that it is.
PACKED = np.zeros((64, 64), np.uint8)
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"weight": np.zeros((64, 128), ml_dtypes.float8_e4m3fn), "weight_scale_inv": np.ones((1, 1), np.float32)},
        "fp8_block128",
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"weight": PACKED, "weight_scale": np.ones((64, 8), ml_dtypes.float8_e4m3fn),
         "weight_scale_2": np.ones((), np.float32), "input_scale": np.ones((), np.float32)},
        "nvfp4",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        {"qweight": np.zeros((16, 64), np.int32), "qzeros": np.full((1, 8), 0x77777777, np.int32),
         "scales": np.ones((1, 64), np.float16), "g_idx": np.zeros(128, np.int32)},
        "int4_g128",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {
            "weight": np.zeros((64, 128), np.int8),
            "SCB": np.ones(64, np.float32),
            "weight_format": np.zeros((), np.uint8),
        },
        "int8_channel",
    ),
}  # fmt: skip


def foreign(folder: Path, method: str, without: str = "") -> Path:
    quantization, pieces, _ = FOREIGN[method]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "quantization_config": quantization,
    }
    return write(folder, {f"{PATH}.{n}": v for n, v in pieces.items() if n != without}, config)


@pytest.mark.parametrize("method", list(FOREIGN))
def test_foreign_methods_are_read_and_counted(cli: Cli, tmp_path: Path, method: str) -> None:
    folder = foreign(tmp_path / "m", method)
    answer = cli("inspect", folder, "--json").json
    (module,) = answer["modules"]
    assert (module["name"], module["role"]) == (PATH, "mlp")
    assert module["parameters"] == 64 * 128
    assert module["scheme"] == FOREIGN[method][2]
    assert answer["oddities"] == []
    assert method in cli("inspect", folder).out


@pytest.mark.parametrize(
    ("method", "without"),
    [("modelopt", "weight_scale"), ("gptq", "qzeros"), ("bitsandbytes", "weight")],
)
def test_contradictions_are_looked_at_all_the_same(
    cli: Cli, tmp_path: Path, method: str, without: str
) -> None:
    """What no container reads is listed as it lies there, and the contradiction is said."""
    folder = foreign(tmp_path / "m", method, without)
    answer = cli("inspect", folder, "--json")
    assert answer.code == 0
    (module,) = answer.json["modules"]
    pieces = [name for name in FOREIGN[method][1] if name != without]
    assert sorted(module["tensors"]) == sorted(f"{PATH}.{name}" for name in pieces)
    assert module["scheme"] not in (FOREIGN[method][2], "")
    assert PATH in answer.json["oddities"][0]
    assert "wanted" in answer.json["oddities"][0]


UPSTREAM = sorted(
    folder for folder in (Path(__file__).parent.parent / "containers/upstream").iterdir()
    if (folder / "decoded.npz").exists()
)  # fmt: skip


@pytest.mark.parametrize("folder", UPSTREAM, ids=lambda folder: folder.name)
def test_upstream_files(cli: Cli, folder: Path) -> None:
    """Every library's checkpoint: as many parameters as the library's own decoded matrices, under schemes' names."""
    answer = cli("inspect", folder, "--json").json
    if any("method is not known" in oddity for oddity in answer["oddities"]):
        return  # no container reads it, and so nothing is said of its schemes
    with np.load(folder / "decoded.npz") as file:
        sizes = {name: file[name].size for name in file.files}
    found = {module["name"]: module for module in answer["modules"]}
    for name, size in sizes.items():
        module = found.get(name)
        if module is None:  # one of a stack that is stored as a whole, or the other way round
            continue
        assert module["parameters"] == size, name
        assert ":" not in module["scheme"]
        assert module["scheme"] not in ("bf16", "fp16", "fp32")
    assert sum(module["bytes"] for module in answer["modules"]) == answer["bytes"]


def test_schemes_that_are_not_ours_are_described_not_renamed(cli: Cli, tmp_path: Path) -> None:
    """Blocks of 64x64 are not fp8_block128; a matrix that no group takes contradicts the config."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "block",
        "block_structure": [64, 64],
    }
    groups = {"group_0": {"targets": ["re:.*up_proj"], "weights": weights}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    pieces = {
        "weight": np.zeros((64, 64), ml_dtypes.float8_e4m3fn),
        "weight_scale": np.ones((1, 1), np.float32),
    }
    one = {f"{PATH}.{name}": part for name, part in pieces.items()}
    answer = cli("inspect", write(tmp_path / "one", one, config), "--json").json
    assert {module["name"]: module["scheme"] for module in answer["modules"]} == {PATH: "fp8_block64"}
    two = one | {f"other.{name}": part for name, part in pieces.items()}
    answer = cli("inspect", write(tmp_path / "two", two, config), "--json").json
    found = {module["name"]: module["scheme"] for module in answer["modules"]}
    assert found == dict.fromkeys((PATH, "other"), "compressed-tensors: F8_E4M3 with weight_scale")
    assert "other is quantized, and no config group says so" in answer["oddities"][0]


def test_stacked_experts(cli: Cli, tmp_path: Path) -> None:
    folder = toys.moe(tmp_path / "moe", "gpt_oss")
    answer = cli("inspect", folder, "--json").json
    experts = [m for m in answer["modules"] if m["role"] == "expert"]
    assert sorted(m["shape"] for m in experts) == [[4, 32, 32], [4, 32, 64]]
    assert sum(m["parameters"] for m in experts) == 4 * 32 * 64 + 4 * 32 * 32


def test_no_config(cli: Cli, tmp_path: Path, llama: Path) -> None:
    folder = write(tmp_path / "m", toys.weights(toys.llama_shapes()), None)
    for model in (folder, folder / "model.safetensors"):
        answer = cli("inspect", model, "--json")
        assert answer.code == 0
        assert answer.json["oddities"][0].startswith("there is no config.json")
        assert answer.json["architectures"] == []


def test_oddities(cli: Cli, tmp_path: Path) -> None:
    shapes = toys.llama_shapes(head=True) | {"model.layers.0.peculiar.thing.weight": (4, 4), "empty": (0, 4)}
    tensors = toys.weights(shapes) | {f"{PATH}.weight_scale": np.ones((352, 1), np.float32)}
    config = toys.llama_config(head=True) | {"tie_word_embeddings": True, "torch_dtype": "float32"}
    folder = write(tmp_path / "m", tensors, config)
    (folder / "pytorch_model.bin").write_bytes(b"")
    text = "\n".join(cli("inspect", folder, "--json").json["oddities"])
    assert "pytorch_model.bin holds weights in another format" in text
    assert "lm_head.weight is stored, and tied to model.embed_tokens.weight" in text
    assert "1 tensors belong to a quantization that the config does not mention" in text
    assert "no rule knows the names of" in text
    assert "empty hold no elements" in text
    assert "the config says float32, and most bytes are bfloat16" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "hqq"}, "the quantization method is not known"),
    ],
)
def test_config_that_promises_scales_without_any(
    cli: Cli, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    config = toys.llama_config() | {"quantization_config": settings}
    folder = write(tmp_path / "m", toys.weights(toys.llama_shapes()), config)
    answer = cli("inspect", folder, "--json")
    assert answer.code == 0
    assert said in answer.json["oddities"][0]


def test_refusals(cli: Cli, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli("inspect", empty).code == 3
    assert "the directory is empty" in cli("inspect", empty).err
    assert cli("inspect", tmp_path / "nothing").code == 2
    assert cli("inspect").code == 2
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    answer = cli("inspect", tmp_path / "model.gguf")
    assert answer.code == 3
    assert "GGUF" in answer.err
    folder = write(tmp_path / "m", toys.weights(toys.llama_shapes()), None)
    (folder / "config.json").write_text("{not json")
    answer = cli("inspect", folder)
    assert answer.code == 3
    assert "config.json is not a JSON object" in answer.err


@pytest.mark.parametrize(
    ("config", "kept", "said"),
    [
        (LLAMA3_8B, 131_072, "131,072 bytes in 16 bits (32 layers x 8 heads x 2 x 128)"),
        # 70.272 kB: arXiv 2505.09343, table 1
        (DEEPSEEK_V3, 70_272, "70,272 bytes in 16 bits (61 layers x 576 of a latent)"),
        (
            GPT_OSS_20B, 49_152,
            "49,152 bytes in 16 bits (12 layers x 8 heads x 2 x 64 within 128 tokens, 12 layers x 8 heads x 2 x 64)",
        ),
        ({"model_type": "of_no_family"}, None, None),
        (LLAMA3_8B | {"hidden_size": "4k"}, None, None),
    ],
    ids=("heads", "latent", "windows", "unknown", "spoiled"),
)  # fmt: skip
def test_what_a_token_adds(
    cli: Cli, tmp_path: Path, config: dict[str, Any], kept: int | None, said: str | None
) -> None:
    """Bytes as they were published; nothing, and no error, where the geometry is not known."""
    model = write(tmp_path / "m", {"model.norm.weight": np.ones(4, np.float32)}, config)
    assert cli("inspect", model, "--json").json["kept_per_token"] == kept
    page = " ".join(cli("inspect", model).out.split())
    assert (said in page) if said is not None else ("kept per token" not in page)
