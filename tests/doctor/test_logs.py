"""Whole logs: what they say runs, what is found in them, what they leave unsaid.

``vllm_cpu_0_32_*`` are what vLLM's CPU build printed for SmolLM2-135M and files made from it, with paths shortened;
the others are put together from messages in the engines' sources, in the forms in which logs reach people.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.doctor import Report, diagnose, read
from narrowcast.errors import InputError

LOGS = Path(__file__).with_name("logs")


def report_of(name: str) -> Report:
    return diagnose(read(LOGS / f"{name}.log"))


def names(report: Report) -> list[str]:
    return [finding.name for finding in report.findings]


def told(report: Report) -> dict[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for one in report.running:
        facts.setdefault(one.kind, []).append(one.what)
    return facts


# Log: engine, version, findings in their order, what is not said.
WHOLE = {
    "vllm_cpu_0_32_w4a16_float16": (
        "vllm",
        "0.32.0",
        ["cast-to-fp16", "eager", "loaded-into-other-dtype"],
        ("attention",),
    ),
    "vllm_cpu_0_32_fp8_dynamic": ("vllm", "0.32.0", ["eager"], ("attention",)),
    "vllm_cpu_0_32_fp8_dynamic_stopped": ("vllm", "0.32.0", ["eager"], ("attention",)),
    "vllm_cpu_0_32_fp8_kv_unquantized": (
        "vllm",
        "0.32.0",
        ["cast-to-fp16", "kv-fp8-unquantized", "kv-quantized", "eager", "loaded-into-other-dtype"],
        ("attention",),
    ),
    "vllm_cpu_0_32_w4a16_fp8_kv": (
        "vllm",
        "0.32.0",
        ["kv-quantized", "eager", "kv-scales-untold"],
        ("attention",),
    ),
    "vllm_cpu_0_32_nvfp4a16_refused": (
        "vllm",
        "0.32.0",
        ["no-kernel", "eager"],
        ("linear kernel", "attention", "KV cache size"),
    ),
    "vllm_0_32_nvfp4_blackwell": ("vllm", "0.32.0", [], ()),
    "vllm_0_11_fp8_ampere": (
        "vllm",
        "0.11.0",
        [
            "weight-only-fp8",
            "kv-fp8-without-scales",
            "attention-uncalibrated",
            "kv-quantized",
        ],
        ("linear kernel",),
    ),
    "vllm_0_8_awq_compose": (
        "vllm",
        "0.8.4",
        ["cast-to-fp16", "slow-method", "not-optimized", "eager"],
        ("linear kernel",),
    ),
    "vllm_0_32_no_kernel_kubernetes": (
        "vllm",
        "0.32.0",
        ["no-kernel"],
        ("linear kernel", "attention", "KV cache size"),
    ),
    "vllm_json_collector": ("vllm", "0.32.0", ["scales-rounded-at-load"], ("attention", "KV cache size")),
    "sglang_0_4_bf16": ("sglang", "", [], ("quantization",)),
    "sglang_0_5_fp8_kv_tp2": ("sglang", "", ["ue8m0-rounding", "kv-scale-missing"], ("linear kernel",)),
    "sglang_0_5_too_little_memory": (
        "sglang",
        "",
        ["too-little-memory", "cast-to-fp16"],
        ("linear kernel", "attention", "KV cache size"),
    ),
    "tensorrt_llm_1_2_mixed": (
        "tensorrt-llm",
        "1.2.0rc2",
        ["configs-diverge", "kv-scheme-unknown", "layer-config-missing"],
        (),
    ),
    "tensorrt_llm_0_18_mpi": ("tensorrt-llm", "0.18.0", [], ()),
    "tensorrt_llm_1_2_refused": ("tensorrt-llm", "1.2.1", ["container-refused"], ("KV cache size",)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_log(name: str) -> None:
    report = report_of(name)
    assert (report.engine, report.version, names(report), report.unsaid) == WHOLE[name]
    assert report.failed == any(finding.severity == "error" for finding in report.findings)


def test_every_log_is_asserted() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*WHOLE, "another_program"}


def test_what_really_ran_on_a_cpu() -> None:
    """The real logs: which kernel computed, in which dtype, how many tokens of KV cache fit into 1 GiB."""
    w4a16 = told(report_of("vllm_cpu_0_32_w4a16_float16"))
    assert w4a16["linear kernel"] == [
        "CPUWNA16LinearKernel for mixed-precision linear",
        "CPUWNA16LinearKernel for CompressedTensorsWNA16",
    ]
    assert (w4a16["dtype"], w4a16["quantization"]) == (["float16"], ["compressed-tensors"])
    fp8 = told(report_of("vllm_cpu_0_32_fp8_dynamic"))
    assert fp8["linear kernel"] == ["ChannelWiseTorchFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"]
    # 30 layers, 3 KV heads of 64: 23040 bytes a token in 16 bit and half of that in FP8; blocks round down.
    assert told(report_of("vllm_cpu_0_32_w4a16_float16"))["KV cache size"] == ["23,296 tokens"]
    assert told(report_of("vllm_cpu_0_32_w4a16_fp8_kv"))["KV cache size"] == ["46,592 tokens"]


def test_repeated_lines_are_counted_once() -> None:
    findings = {finding.name: finding for finding in report_of("vllm_cpu_0_32_w4a16_float16").findings}
    text = (LOGS / "vllm_cpu_0_32_w4a16_float16.log").read_bytes().decode().split("\n")
    lines = [number for number, line in enumerate(text, 1) if "Attempted to load weight" in line]
    found = findings["loaded-into-other-dtype"]
    assert (found.count, found.first) == (len(lines), lines[0])
    assert found.line in text[lines[0] - 1]
    assert "[utils.py" not in found.line


def test_reasons_of_kernels_are_kept() -> None:
    (found,) = report_of("vllm_0_32_no_kernel_kubernetes").findings
    assert found.details == (
        "CutlassFP8ScaledMMLinearKernel requires compute capability 89.",
        "MarlinFP8ScaledMMLinearKernel disabled by VLLM_DISABLED_KERNELS.",
    )


def test_another_program_is_refused() -> None:
    with pytest.raises(InputError, match="no start-up log of vLLM, SGLang or TensorRT-LLM") as refusal:
        report_of("another_program")
    assert refusal.value.exit_code == 3


@pytest.mark.parametrize("lines", [[], [""], ["\n", "  \n"]])
def test_an_empty_log_is_refused(lines: list[str]) -> None:
    with pytest.raises(InputError, match="nothing but empty lines"):
        diagnose(lines)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.log", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            diagnose(read(path))


@pytest.mark.parametrize(
    "line",
    [
        "INFO:     Application startup complete.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
    ],
)
def test_what_any_server_prints_makes_no_engine(line: str) -> None:
    with pytest.raises(InputError, match="no start-up log"):
        diagnose([line])


def test_what_is_settled_later_replaces_auto() -> None:
    config = "Initializing a V1 LLM engine (v0.32.0) with config: model='m', kv_cache_dtype=auto, x"
    kv = "Using fp8_e4m3 data type to store kv cache. Dynamic per-token-head scales will be computed at runtime."
    assert told(diagnose([config]))["KV cache dtype"] == ["auto"]
    assert told(diagnose([config, kv]))["KV cache dtype"] == ["fp8_e4m3"]


def test_a_shared_line_alone_leaves_the_engine_open() -> None:
    report = diagnose(["Casting torch.bfloat16 to torch.float16."])
    assert report.engine == "vllm or sglang"
    assert names(report) == ["cast-to-fp16"]


def test_two_engines_in_one_log_are_noticed() -> None:
    both = [*read(LOGS / "vllm_0_11_fp8_ampere.log"), *read(LOGS / "sglang_0_5_fp8_kv_tp2.log")]
    assert "several-engines" in names(diagnose(both))


def test_a_crash_loop_is_noticed() -> None:
    once = list(read(LOGS / "vllm_0_32_no_kernel_kubernetes.log"))
    report = diagnose(once * 3)
    assert names(report) == ["no-kernel", "started-again"]
    assert [finding.count for finding in report.findings] == [3, 3]


BANNER = (
    "(APIServer pid=1) INFO 11-30 01:00:00 [api_utils.py:347] vLLM server version 0.32.0, serving model m"
)
READY = "(APIServer pid=1) INFO:     Application startup complete."
ECHO = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."


def test_the_root_of_an_unknown_error_is_shown() -> None:
    lines = [
        BANNER,
        "Traceback (most recent call last):",
        "AttributeError: 'X' object has no attribute 'y'",
        ECHO,
    ]
    (found,) = diagnose(lines).findings
    assert (found.name, found.severity, found.first) == ("ends-in-error", "error", 3)
    assert found.line == "AttributeError: 'X' object has no attribute 'y'"


def test_an_error_that_was_overcome_is_none() -> None:
    lines = [BANNER, "ImportError: no module named 'extra'", *["INFO 11-30 01:00:00 [x.py:1] fine"] * 70]
    assert diagnose(lines).findings == ()
    assert diagnose([BANNER, "ImportError: no module named 'extra'", READY]).findings == ()


def test_an_error_while_serving_is_a_warning() -> None:
    report = diagnose([BANNER, READY, "ValueError: the request is odd"])
    assert names(report) == ["failed-later"]
    assert not report.failed


def test_stopping_an_engine_is_no_error() -> None:
    stopped = (
        "(EngineCore pid=2) INFO 11-30 01:00:09 [core.py:1454] [shutdown] trigger received signal=SIGTERM"
    )
    assert diagnose([BANNER, stopped, "RuntimeError: cancelled"]).findings == ()


def test_a_name_that_promises_quantization() -> None:
    config = "Initializing a V1 LLM engine (v0.32.0) with config: model='org/M-{}', quantization=None, x"
    assert names(diagnose([config.format("NVFP4")])) == ["named-quantized"]
    assert names(diagnose([config.format("Instruct")])) == []


def test_scales_rounded_at_load_needs_the_format_to_be_unsaid() -> None:
    lines = list(read(LOGS / "vllm_json_collector.log"))
    said = "Detected quantization_config.scale_fmt=ue8m0; enabling UE8M0 for DeepGEMM."
    assert names(diagnose([*lines, said])) == []
    hopper = [line for line in lines if "DeepGemmFp8" not in line]
    assert names(diagnose(hopper)) == []


def test_json_has_stable_keys() -> None:
    content = report_of("vllm_0_11_fp8_ampere").to_json()
    assert list(content) == ["engine", "version", "lines", "running", "unsaid", "findings"]
    assert set(content["running"][0]) == {"kind", "what", "line"}
    keys = ("name", "severity", "said", "consequence", "remedy", "line", "count", "first", "details")
    assert tuple(content["findings"][0]) == keys
