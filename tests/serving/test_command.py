"""The command of a plan: each flag exists in the engine, is there for a reason, and says what was asked.

Flags are held against the engines' own argument definitions (engine_flags.py), names against hardware/names.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.gpus import gpus
from narrowcast.hardware.names import CACHE, METHOD, find
from narrowcast.serving.command import DIALECTS, Command, command, dialect, quoted
from narrowcast.serving.loading import from_config, load
from narrowcast.serving.online import method
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from serving.engine_flags import SNAPSHOT, packages, read

KNOWN = json.loads(SNAPSHOT.read_text())
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "max_position_embeddings": 32768,
}  # fmt: skip


def made(
    engine: str = "vllm", gpu: str = "h100", config: dict[str, Any] | None = None, preset: str | None = None,
    container: str | None = None, quantization: str | None = None, extra: tuple[str, ...] = (),
    environment: dict[str, str] | None = None, **asked: Any,
) -> Command:  # fmt: skip
    served = from_config("org/model", config or LLAMA, preset=preset, container=container)
    question = Question(gpus[gpu], engine, **asked)
    return command(served, question, quantization=quantization, extra=extra, environment=environment)


def flags(command: Command) -> dict[str, str]:
    return {flag.name: flag.value for flag in command.flags}


# ---- Flags and names are the engines' own


@pytest.mark.parametrize("version", KNOWN)
def test_every_flag_and_variable_is_one_of_the_engine(version: str) -> None:
    spoken, known = dialect(version.split()[0]), KNOWN[version]
    assert {row.name for row in spoken.rows} <= set(known["flags"])
    assert {row.name for row in spoken.environment} <= set(known["variables"])
    assert not spoken.gone.keys() & {*known["flags"], *known["variables"]}


@pytest.mark.parametrize("version", packages() or ["none"])
def test_the_snapshot_is_what_the_engines_here_define(version: str) -> None:
    if version not in packages():
        pytest.skip("no engine is here: make engine-test unpacks them")
    assert read(version, packages()[version]) == KNOWN[version]


@pytest.mark.parametrize("engine", DIALECTS)
def test_what_is_made_while_loading_is_a_name_of_the_engine(engine: str) -> None:
    for preset, (name, low) in dialect(engine).online.items():
        row = method(engine, name)
        assert low >= (row.low or 0)
        linear = from_config("m", LLAMA, preset=preset).groups
        weights = {group.scheme for group in linear if group.linear is not None}
        assert weights <= set(row.weights.split(" or "))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_cache_that_the_engine_has_becomes_a_word_that_it_takes(engine: str) -> None:
    for mode, row in CACHE_MODES.items():
        if row.engines.get(engine) and row.heads and " " not in row.engines[engine][0]:
            given = flags(made(engine, "b200", kv=mode)).get("--kv-cache-dtype")
            if mode == "bf16":
                assert given is None  # the model's own
                continue
            assert given is not None
            assert find(given, engine, CACHE)[0].mode == mode
            assert flags(made(engine, "b200", kv=given))["--kv-cache-dtype"] == given


# ---- What is asked is what is given


def test_the_whole_command() -> None:
    got = made(context=32768, batch=64, tp=2, kv="fp8", preset="fp8_dynamic")
    assert got.argv == (
        "vllm", "serve", "org/model", "--quantization", "fp8_per_channel", "--kv-cache-dtype", "fp8",
        "--tensor-parallel-size", "2", "--max-model-len", "32768", "--max-num-seqs", "64",
        "--gpu-memory-utilization", "0.9",
    )  # fmt: skip
    assert not got.refusals
    assert all(flag.reason and flag.source for flag in got.flags)
    assert got.in_python("py")[:5] == (
        "py",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "org/model",
    )
    sglang = made("sglang", context=32768, batch=64, tp=2, kv="fp8", preset="fp8_dynamic")
    assert sglang.argv == (
        "sglang", "serve", "org/model", "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3", "--tp-size", "2",
        "--context-length", "32768", "--max-running-requests", "64", "--mem-fraction-static", "0.9",
    )  # fmt: skip
    trt = made("tensorrt-llm", context=32768, batch=64, tp=2, kv="fp8")
    assert trt.argv == (
        "trtllm-serve", "org/model", "--tp_size", "2", "--max_seq_len", "32768", "--max_batch_size", "64",
        "--extra_llm_api_options", "trtllm-options.yaml",
    )  # fmt: skip


def test_the_share_of_what_weights_leave_is_the_share_of_all() -> None:
    got = made("tensorrt-llm", kv="fp8", context=1024)
    memory, weights = 80e9, from_config("m", LLAMA).nbytes
    share = float(got.files["trtllm-options.yaml"].rpartition("fraction: ")[2])
    assert weights + share * (memory - weights) == pytest.approx(
        0.9 * memory, abs=0.005 * memory
    )  # two digits
    assert float(flags(made("tensorrt-llm", context=1024))["--kv_cache_free_gpu_memory_fraction"]) == share


def test_a_preset_that_the_engine_does_not_make_is_made_first() -> None:
    got = made(preset="w4a16")
    assert got.model == "model-w4a16"
    assert got.before == ("narrowcast quantize org/model model-w4a16 --preset w4a16",)
    assert "--quantization" not in flags(got)
    other = made("tensorrt-llm", preset="fp8_dynamic", container="modelopt")
    assert other.before[0].endswith("--preset fp8_dynamic --container modelopt")


def test_fp8_per_channel_is_not_made_while_loading_where_marlin_would_run() -> None:
    got = made(gpu="a100", preset="fp8_dynamic")
    assert got.before
    assert "--quantization" not in flags(got)


def test_more_gpus_than_a_machine_has() -> None:
    ray = made(tp=8, pp=2)
    assert flags(ray)["--distributed-executor-backend"] == "ray"
    assert [line.split()[:2] for line in ray.before] == [["ray", "start"]] * 2
    each = flags(made("sglang", tp=8, pp=2))
    assert (each["--nnodes"], each["--node-rank"]) == ("2", "RANK")
    assert flags(made(tp=8)).keys() & {"--distributed-executor-backend"} == set()
    assert "--gpus_per_node" in flags(made("tensorrt-llm", tp=8, pp=2))
    (warning,) = made(
        tp=16, pp=1, config=LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 16}
    ).warnings
    assert "--tp 8 --pp 2" in warning


def test_experts_are_spread_where_there_are_some() -> None:
    assert flags(made(config=MIXTRAL, tp=4, ep=True))["--enable-expert-parallel"] == ""
    assert flags(made("sglang", config=MIXTRAL, tp=4, ep=True))["--ep-size"] == "4"
    dense = made(tp=4, ep=True)
    assert "--enable-expert-parallel" not in flags(dense)
    assert dense.warnings == ("the model has no routed experts to spread",)


def test_a_context_beyond_the_positions_is_cut_and_said() -> None:
    got = made(context=1 << 20)
    assert flags(got)["--max-model-len"] == "131072"
    assert "fewer than" in next(flag.reason for flag in got.flags if flag.name == "--max-model-len")


@pytest.mark.parametrize(
    ("config", "gpu", "engine", "dtype"),
    [
        (LLAMA, "h100", "vllm", None),
        (LLAMA, "t4", "vllm", "float16"),
        (LLAMA | {"model_type": "qwen2", "torch_dtype": "float16"}, "h100", "vllm", "bfloat16"),
        (LLAMA | {"torch_dtype": "float16"}, "h100", "vllm", None),
        (LLAMA | {"torch_dtype": "float32"}, "h100", "sglang", "bfloat16"),
    ],
)
def test_the_dtype_is_given_where_the_configs_would_go_wrong(
    config: dict[str, Any], gpu: str, engine: str, dtype: str | None
) -> None:
    assert flags(made(engine, gpu, config=config)).get("--dtype") == dtype


def test_a_config_without_a_dtype_is_found_beside_the_model(tmp_path: Any) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "x.Y"}}))
    served = from_config(str(tmp_path), config)
    got = command(served, Question(gpus["h100"]))
    assert flags(got)["--dtype"] == "bfloat16"
    assert any("--trust-remote-code" in text for text in got.warnings)
    assert "--trust-remote-code" not in flags(got)
    trt = command(served, Question(gpus["h100"], "tensorrt-llm"))
    assert trt.files == {"trtllm-options.yaml": "dtype: bfloat16\n"}


def test_on_a_cpu_the_cache_is_counted_in_bytes() -> None:
    got = flags(made(gpu="cpu", context=300, batch=2))
    # 3 blocks of 128 tokens for each of 2 sequences and one of vLLM's, K and V of 32 layers of 8 heads of 128, 2 bytes
    nbytes = (3 * 2 + 1) * 128 * 2 * 32 * 8 * 128 * 2
    assert int(got["--kv-cache-memory-bytes"]) == -(-nbytes // (1 << 20)) * (1 << 20)
    assert "--gpu-memory-utilization" not in got


def test_int8_on_blackwell_is_forced_onto_the_kernel_that_runs() -> None:
    got = made(gpu="b200", preset="int8")
    assert flags(got)["--linear-backend"] == "triton"
    assert not got.refusals
    assert "--linear-backend" not in flags(made(gpu="h100", preset="int8"))


def test_scales_that_are_no_powers_of_two_stay_so_on_hopper() -> None:
    assert made(preset="fp8_block").environment == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert not made(preset="fp8_block_ue8m0", container="fp8").environment
    assert not made(gpu="b200", preset="fp8_block").environment
    assert made(preset="fp8_block").lines()[0].startswith("VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve")


def test_backends_that_read_the_cache_are_named_for_sglang() -> None:
    assert flags(made("sglang", "b200", kv="mxfp8"))["--attention-backend"] == "fa4"
    assert flags(made("sglang", "b200", kv="nvfp4"))["--attention-backend"] == "trtllm_mha"
    assert flags(made("sglang", "h100", kv="fp4_mx_block16"))["--attention-backend"] == "triton"
    assert "--attention-backend" not in flags(made("sglang", kv="fp8"))


# ---- Words that are old, unknown or in the wrong place


def test_the_old_name_of_fp8_is_replaced_and_said() -> None:
    got = made(quantization="fp8")
    assert flags(got)["--quantization"] == "fp8_per_tensor"
    assert any("deprecated for online quantization" in text for text in got.warnings)
    assert flags(made("sglang", quantization="fp8"))["--quantization"] == "fp8"  # means another thing there


@pytest.mark.parametrize("name", ["fp88", "awq", "compressed-tensors", "modelopt"])
def test_names_that_make_nothing_of_this_model_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        made(quantization=name)
    assert name == "fp88" or find(name, "vllm", METHOD)


def test_near_names_are_named() -> None:
    with pytest.raises(UsageError, match="fp8_per_channel"):
        made(quantization="fp8_per_chanel")
    with pytest.raises(UsageError, match="no flag --quantization"):
        made("tensorrt-llm", quantization="FP8")
    with pytest.raises(UsageError, match="did you mean fp8"):
        made(kv="fp8_e4m33")
    with pytest.raises(UsageError, match="no such KV cache"):
        made("sglang", kv="turboquant_k8v4")
    with pytest.raises(UsageError, match="no server command"):
        made("transformers")


def test_old_names_of_caches_are_replaced() -> None:
    got = made("sglang", kv="fp4_e2m1")
    assert flags(got)["--kv-cache-dtype"] == "fp4_mx_block16"
    assert any("fp4_e2m1" in text for text in got.warnings)


def test_what_is_gone_is_told_with_what_does_it_now() -> None:
    got = made(environment={"VLLM_NVFP4_GEMM_BACKEND": "marlin"}, extra=("--calculate-kv-scales",))
    assert any("VLLM_NVFP4_GEMM_BACKEND; instead: --linear-backend" in text for text in got.warnings)
    assert any("calibrate-kv" in text for text in got.warnings)


def test_the_users_flags_come_last_and_replace_ours() -> None:
    got = made(extra=("--max-model-len=1000", "--enforce-eager"))
    assert got.argv[-2:] == ("--max-model-len=1000", "--enforce-eager")
    assert "--max-model-len" not in flags(got)


# ---- What speaks against it


def test_a_layer_without_a_kernel_is_refused_in_the_engines_words() -> None:
    (text,) = made("tensorrt-llm", preset="int8").refusals
    assert text.startswith("q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj: ")
    assert "instead: " in text


def test_a_size_that_cuts_heads_is_refused() -> None:
    (text,) = made(tp=3).refusals
    assert text.startswith("--tp 3: ")


def test_a_model_that_does_not_fit_is_said() -> None:
    assert any("does not fit" in text for text in made(gpu="t4", context=1024).warnings)


def test_a_scaled_cache_without_scales_is_said_and_one_without_need_is_not() -> None:
    assert any("1.0" in text for text in made(kv="fp8").warnings)
    assert not made(kv="fp8_per_token_head").warnings


def test_it_is_plain_data() -> None:
    got = json.loads(json.dumps(made(kv="fp8", preset="fp8_block").to_json()))
    assert got["argv"][:2] == ["vllm", "serve"]
    assert {"name", "value", "reason", "source"} == set(got["flags"][0])


def test_served_is_not_read_for_a_name_that_is_no_file() -> None:
    served: Served = from_config("nowhere/model", LLAMA)
    assert command(served, Question(gpus["l4"])).model == "nowhere/model"


def test_a_config_file_is_served_from_its_folder_and_missed_weights_are_told(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    made = command(load(file), Question(gpus["h100"]))
    assert made.model == str(tmp_path)
    assert any("no weights" in text for text in made.warnings)
    (tmp_path / "model.safetensors").touch()
    assert not any("no weights" in text for text in command(load(file), Question(gpus["h100"])).warnings)


@pytest.mark.parametrize(
    ("engine", "gpu", "kv", "instead"),
    [
        ("vllm", "t4", "fp8", "--kv-cache-dtype bfloat16, or int8_per_token_head"),
        ("vllm", "a100", "nvfp4_4over6", "--kv-cache-dtype bfloat16"),
        ("vllm", "b200", "fp8_e5m2", "--kv-cache-dtype fp8"),
        ("sglang", "h100", "mxfp8", "fp8_e4m3"),
        ("sglang", "h100", "nvfp4", "fp8_e4m3"),
        ("tensorrt-llm", "h100", "nvfp4", None),
    ],
)
def test_attention_that_cannot_read_the_cache(engine: str, gpu: str, kv: str, instead: str | None) -> None:
    (text,) = made(engine, gpu, kv=kv).refusals
    assert text.startswith(f"attention over a KV cache in {CACHE_MODES[kv].name}: ")
    assert text.endswith(f"; instead: {instead}") if instead else "instead" not in text


def test_attention_that_a_flag_mends_is_not_refused() -> None:
    got = made("sglang", "rtx 5090", kv="nvfp4")
    assert flags(got)["--attention-backend"] == "triton"
    assert not got.refusals
    assert not made("vllm", "a100", kv="nvfp4").refusals  # FlashInfer's kernels decode it
    assert not made("sglang", "h100", kv="mxfp8", extra=("--attention-backend", "other")).refusals


def test_caches_that_sglang_does_not_take_from_configs() -> None:
    """Its auto follows ModelOpt's FP8 alone."""
    asking = {
        (container, mode): replace(from_config("m", LLAMA), container=container, kv=mode, kv_scales=True)
        for container in ("modelopt", "compressed-tensors") for mode in ("fp8_e4m3", "nvfp4")
    }  # fmt: skip
    given = {
        key: flags(command(served, Question(gpus["b200"], "sglang"))).get("--kv-cache-dtype")
        for key, served in asking.items()
    }
    assert given.pop(("modelopt", "fp8_e4m3")) is None
    assert given == {key: key[1] for key in given}
    backend = flags(command(asking["modelopt", "nvfp4"], Question(gpus["b200"], "sglang")))[
        "--attention-backend"
    ]
    assert backend == "trtllm_mha"


@pytest.mark.parametrize(
    "word", ["plain", "two words", "it's", "$(x)`y`", "new\nline", "tab\t'\\", "\x1b[31m", "\udcff", ""]
)
def test_words_are_read_back_by_a_shell_as_they_are(word: str) -> None:
    line = f"printf %s {quoted(word)}"
    assert line.isprintable()
    found = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert found == os.fsencode(word)


@pytest.mark.parametrize("word", ["float16", "torch.float16"])
def test_a_dtype_is_read_as_the_geometry_reads_it(tmp_path: Path, word: str) -> None:
    """Qwen2 overflows in float16, whichever way its config spells it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "qwen2", "torch_dtype": word}))
    made = command(load(tmp_path), Question(gpus["h100"]))
    assert flags(made)["--dtype"] == "bfloat16"
