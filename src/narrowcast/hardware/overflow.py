"""Families of models whose activations leave the range of fp16, 65504: in fp16 they give NaN, or text of one token.

They were trained in bf16, whose range is fp32's. A checkpoint of such a family that says float16 is served wrong
without a word, or refused. What is listed has been reported or is guarded against by a library; a family that is not
listed may overflow as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Overflow:
    """Why a family overflows, who refuses to run it in fp16, and where that is said."""

    reason: str
    source: str
    refused_by: tuple[str, ...] = ()


_UNSTABLE = Overflow(
    "numerically unstable in fp16", "vLLM 0.32, config/model.py (_FLOAT16_NOT_SUPPORTED_MODELS)", ("vllm",)
)
_T5 = Overflow(
    "the output of the feed-forward network passes 65504; transformers keeps its wo in fp32 for it",
    "github.com/huggingface/transformers issues 5651 and 4586; transformers 5.24, models/t5 (_keep_in_fp32_modules)",
)
_CLAMPED = Overflow(
    "hidden states pass 65504; transformers clamps them in fp16",
    "github.com/huggingface/transformers issue 9295; transformers 5.24, models/longt5 and switch_transformers",
)
_QWEN2 = Overflow(
    "hidden states and attention scores pass 65504 in models of this family: the text is exclamation marks",
    "github.com/QwenLM/Qwen3 issues 761 and 868, github.com/vllm-project/vllm issue 14126",
)
_QWEN2_VL = Overflow(
    "attention scores pass 65504: the text is exclamation marks",
    "github.com/huggingface/transformers issue 33294 and pull request 33312",
)

fp16_families: Mapping[str, Overflow] = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "glm4"), _UNSTABLE),
    **dict.fromkeys(("t5", "mt5", "umt5", "pop2piano", "udop"), _T5),
    **dict.fromkeys(("longt5", "switch_transformers"), _CLAMPED),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2_VL,
}
