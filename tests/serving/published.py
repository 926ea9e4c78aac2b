"""Published measurements of decoding, as they were published: what was run, on what, and how fast it was.

Speculative decoding is left out: a step gives several tokens. ``context`` is the shortest that the measurement saw
(the prompt, or 1 where it is not said), and where an engine may have converted more than the file says, all matrices
count in the narrow format: the bound is the least. READMEs bear no dates; their commit says which state was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.hardware.gpus import gpus
from narrowcast.model.roles import Role
from narrowcast.serving.loading import from_config
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.side_by_side import in_format
from serving.configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA2_7B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    QWEN3_8B,
    QWEN15_72B,
)

AO = "https://github.com/pytorch/ao/blob/03d01adcbcf8f85b0e61bef84957013b89e6902f/torchao/quantization/README.md"
FAST = "https://github.com/pytorch-labs/gpt-fast/blob/0f925b5d4ce457b89a7ca6c9ce50f42bf2576945/README.md"
CPP = "https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference/blob/00dd2bdeb2404263f22bd6c1cd46ce397e341db5/README.md"


@dataclass(frozen=True)
class Measured:
    """``format``: a row of the side-by-side table with "all" matrices in it or the "linears", "experts" where experts
    alone are in MXFP4, or a preset. ``rate`` is tokens a second of one sequence."""

    model: str
    config: dict[str, Any]
    gpu: str
    engine: str
    format: str
    covers: str
    rate: float
    context: int
    source: str
    date: str
    batch: int = 1
    tp: int = 1

    def served(self) -> Served:
        """The model as it was run."""
        plain = from_config(self.model, self.config)
        if self.covers in ("all", "linears"):
            return in_format(plain, self.format, "all" if self.covers == "all" else "linears")
        if self.covers == "preset":
            return from_config(self.model, self.config, preset=self.format)
        narrow = in_format(plain, self.format)
        return replace(plain, groups=tuple(
            low if wide.matrix.role is Role.EXPERT else wide
            for wide, low in zip(plain.groups, narrow.groups, strict=True)
        ))  # fmt: skip

    def question(self) -> Question:
        return Question(gpus[self.gpu], tp=self.tp, batch=self.batch, context=self.context)


def measurements() -> Iterator[Measured]:
    """All of them."""
    for form, rate in (
        ("BF16", 95.64),
        ("INT8", 153.03),
        ("INT4 g128", 180.80),
    ):  # INT4 ran with groups of 64
        yield Measured(
            "Llama-3-8B", LLAMA3_8B, "a100", "torchao", form, "all", rate, 1, AO, "commit 03d01adc"
        )
    for form, rate in (("BF16", 107.38), ("INT8", 170.83), ("INT4 g128", 201.14)):
        yield Measured(
            "Llama-2-7B", LLAMA2_7B, "a100", "torchao", form, "all", rate, 1, AO, "commit 03d01adc"
        )
    for tp, rate in ((1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43)):
        yield Measured(
            "Llama-2-7B",
            LLAMA2_7B,
            "a100",
            "gpt-fast",
            "BF16",
            "all",
            rate,
            5,
            FAST,
            "commit 0f925b5d",
            tp=tp,
        )
    for form, tp, rate in (
        ("INT8", 1, 19.13),
        ("INT4 g128", 1, 25.25),
        ("BF16", 8, 62.50),
        ("INT8", 8, 80.44),
    ):
        yield Measured(
            "Llama-2-70B",
            LLAMA2_70B,
            "a100",
            "gpt-fast",
            form,
            "all",
            rate,
            5,
            FAST,
            "commit 0f925b5d",
            tp=tp,
        )
    for gpu, rate in (("rtx 4090", 54.84), ("rtx 3090", 47.40)):
        yield Measured("Llama-3-8B", LLAMA3_8B, gpu, "llama.cpp", "BF16", "all", rate, 1, CPP, "2024-05")
    for gpu, rate in (("a100", 73.83), ("h100 pcie", 83.32), ("rtx a6000", 44.01)):
        yield Measured("Llama-2-7B", LLAMA2_7B, gpu, "llama.cpp", "BF16", "all", rate, 1, CPP, "2023-12")
    yield Measured("Qwen3-8B", QWEN3_8B, "rtx 5090", "imp", "NVFP4", "all", 225, 1,
                   "https://github.com/kekzl/imp/pull/397", "2026-05-24")  # fmt: skip
    yield Measured("Qwen3-8B", QWEN3_8B, "rtx 5090", "vLLM 0.21", "NVFP4", "linears", 143, 1,
                   "https://github.com/kekzl/imp/pull/397", "2026-05-24")  # fmt: skip
    yield Measured("gpt-oss-20b", GPT_OSS_20B, "rtx 5090", "imp", "MXFP4", "all", 343.6, 1,
                   "https://github.com/kekzl/imp/issues/984", "2026-07-12")  # fmt: skip
    yield Measured("gpt-oss-120b", GPT_OSS_120B, "a100", "vLLM", "MXFP4", "experts", 90, 1,
                   "https://github.com/vllm-project/vllm/issues/22331", "2025-08-28")  # fmt: skip
    yield Measured("gpt-oss-120b", GPT_OSS_120B, "gb10", "Ollama", "MXFP4", "experts", 43.9, 1,
                   "https://github.com/AlexsJones/llmfit/pull/917", "2026-08-19")  # fmt: skip
    yield Measured("gpt-oss-120b", GPT_OSS_120B, "mi300x", "vLLM 0.17", "MXFP4", "experts", 1000 / 31.4, 1024,
                   "https://github.com/SemiAnalysisAI/InferenceX/pull/1061", "2026-04-17", batch=64)  # fmt: skip
    yield Measured("DeepSeek-V3", DEEPSEEK_V3, "h200", "SGLang", "fp8_block", "preset", 13, 1,
                   "https://github.com/sgl-project/sglang/issues/3196", "2025-01-30", tp=8)  # fmt: skip
    yield Measured("DeepSeek-V3.2", DEEPSEEK_V32, "h20", "vLLM 0.13", "fp8_block", "preset", 30, 1,
                   "https://github.com/vllm-project/vllm/issues/30832", "2025-12-17", tp=8)  # fmt: skip
    yield Measured("Qwen1.5-72B", QWEN15_72B, "l20", "vLLM 0.5", "BF16", "all", 1000 / 39.0, 1024,
                   "https://github.com/vllm-project/vllm/issues/4852", "2024-06-11", tp=8)  # fmt: skip
    for batch, rate in ((1, 35.04), (16, 49.97)):
        yield Measured("Llama-3.3-70B", LLAMA3_70B, "b200", "vLLM 0.9", "FP8", "linears", rate, 512,
                       "https://github.com/vllm-project/vllm/issues/20710", "2025-07-09", batch, 2)  # fmt: skip
    yield Measured("Llama-3.1-405B", LLAMA3_405B, "mi355x", "vLLM", "MXFP4", "linears", 1000 / 75.58, 1021,
                   "https://github.com/vllm-project/vllm/pull/25135", "2025-09-18", batch=64)  # fmt: skip


@dataclass(frozen=True)
class Speedup:
    """A published ratio of decode speeds against 16 bits of the same engine on the same GPU, batch 1."""

    model: str
    config: dict[str, Any]
    gpu: str
    format: str
    ratio: float
    source: str


SPEEDUPS = (
    Speedup(
        "Llama-3.1-8B",
        LLAMA3_8B,
        "h200",
        "FP8",
        1.41,
        "NVIDIA ModelOpt, examples/benchmark.md: TensorRT-LLM 0.15",
    ),
    Speedup("Llama-3.1-8B", LLAMA3_8B, "h200", "INT4 g128", 1.33, "NVIDIA ModelOpt, examples/benchmark.md"),
    Speedup(
        "Llama-3-8B", LLAMA3_8B, "b200", "NVFP4", 1.06, "pytorch/ao docs, workflows/inference.md: vLLM 0.13"
    ),
    Speedup(
        "Llama-3-8B", LLAMA3_8B, "b200", "FP8", 1.11, "pytorch/ao docs, workflows/inference.md: vLLM 0.13"
    ),
    Speedup("Llama-3-8B", LLAMA3_8B, "h100", "FP8", 1.21, "pytorch/ao docs, workflows/inference.md"),
    Speedup("Llama-3.1-8B", LLAMA3_8B, "h100", "FP8", 1.7, "course notes on FP8 inference with vLLM"),
    Speedup("Llama-3.1-8B", LLAMA3_8B, "l40s", "FP8", 1.5, "course notes on FP8 inference with vLLM"),
    Speedup("Llama-3-8B", LLAMA3_8B, "a100", "INT8", 153.03 / 95.64, AO),
    Speedup("Llama-3-8B", LLAMA3_8B, "a100", "INT4 g128", 180.80 / 95.64, AO),
)
