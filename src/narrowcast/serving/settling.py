"""What must be settled before a command has flags, and what speaks against it.

    dtype          the config's, unless it overflows, is missing, or the GPU does not multiply it
    quantization   none for a checkpoint that announces itself; the engine's own name for making a preset while loading
    cache          the engine's word for the mode, whoever's word was typed

Refusals are the engine's, with its reason; warnings are ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.engines import engines, paths
from narrowcast.hardware.overflow import fp16_families
from narrowcast.model.roles import Role
from narrowcast.serving.flags import Asked, Dialect, Flag
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.store.checkpoint import text_config

# Words that engines had for a mode, with today's.
OLD_CACHES: Mapping[str, Mapping[str, str]] = {"sglang": {"fp4_e2m1": "fp4_mx_block16"}}
_NONE: Mapping[str, Any] = {}


def config_of(served: Served) -> Mapping[str, Any]:
    """The config beside the model, {} where the model is not on this machine."""
    path = Path(served.name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return _NONE
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return _NONE
    return config if isinstance(config, dict) else _NONE


def powers_of_two(config: Mapping[str, Any]) -> bool:
    """Whether the config says that block scales are, as DeepSeek V3.1's does."""
    block = config.get("quantization_config")
    return isinstance(block, dict) and block.get("scale_fmt") == "ue8m0"


def dtype(served: Served, question: Question, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The dtype to ask for with the reason, or None where the engine takes the config's."""
    gpu, said = question.gpu, served.geometry.dtype
    if config:
        text = text_config(config)
        word = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or ""
        said = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(str(word), str(word))
    overflow = fp16_families.get(str(config.get("model_type", served.geometry.family)))
    if gpu.formats and "bf16" not in gpu.formats and "fp16" in gpu.formats:
        but = f", although in FP16 {overflow.reason}" if overflow else ""
        return ("float16", f"{gpu.name} does not multiply BF16{but}") if said != "fp16" else None
    if said == "fp16" and overflow is not None:
        return "bfloat16", f"the config says float16, in which {overflow.reason}"
    if said == "fp32":
        return "bfloat16", "the config says float32; vLLM would take BF16 by itself and SGLang FP16"
    if not said:
        return "bfloat16", "the config names no dtype; vLLM would take BF16 by itself and SGLang FP16"
    return None


def quantization(spoken: Dialect, served: Served, name: str | None) -> tuple[str | None, str | None]:
    """The engine's name for what it makes while loading, and the name of a checkpoint that must be made first."""
    if name is not None:
        return _checked(spoken, served, name), None
    if served.preset is None:
        return None, None
    online = spoken.online.get(served.preset)
    if online is not None:
        return online, None
    return None, f"{Path(served.name).name}-{served.preset.replace('+', '-')}"


def _checked(spoken: Dialect, served: Served, name: str) -> str:
    title = engines[spoken.engine].title
    plain = served.container == "plain" or served.preset is not None
    if plain and spoken.engine == "vllm" and name == "fp8":
        raise UsageError(
            f"{title} {spoken.version} no longer makes FP8 of an unquantized checkpoint under this name",
            got="--quantization fp8", wanted="fp8_per_tensor (what fp8 was), fp8_per_channel or fp8_per_block",
            remedy="--preset fp8_per_tensor, or --preset fp8_dynamic, whose scales are per channel",
        )  # fmt: skip
    return name


def cache(spoken: Dialect, served: Served, question: Question) -> str | None:
    """The engine's word for the mode that is asked for, or None where it needs none. UsageError for a mode that the
    engine does not have."""
    asked = question.kv.lower()
    if asked == "auto":
        return None
    row = CACHE_MODES[OLD_CACHES.get(spoken.engine, {}).get(asked, asked)]
    words = row.engines.get(spoken.engine, ())
    if not words:
        known = sorted(mode for mode in CACHE_MODES if CACHE_MODES[mode].engines.get(spoken.engine))
        raise UsageError(
            f"{engines[spoken.engine].title} has no such KV cache", got=question.kv, wanted=", ".join(known)
        )
    if " " in words[0]:
        return None  # the checkpoint decides it
    if row.name == "bf16":
        wide = [word for word in words if word != "auto"]
        return (asked if asked in wide else wide[0]) if wide and served.kv is not None else None
    return asked if asked in words else words[-1]


def refusals(asked: Asked, flags: Sequence[Flag]) -> Iterator[str]:
    """What the engine would stop at, each once: layers without a kernel, by name."""
    forced = any(flag.name == "--linear-backend" for flag in flags)
    said: dict[str, list[str]] = {}
    for group in asked.served.groups:
        text = None if group.linear is None else _refusal(asked, group)
        if text is not None and not (forced and "CUTLASS" in text):
            said.setdefault(text, []).append(group.matrix.leaf)
    for text, names in said.items():
        yield f"{', '.join(dict.fromkeys(names))}: {text}"


def _refusal(asked: Asked, group: Group) -> str | None:
    assert group.linear is not None
    (n, k), tp = group.matrix.shape, asked.question.tp
    cut = tp if group.matrix.role is not Role.EXPERT or not asked.question.ep else 1
    shape = (
        (n // cut, k)
        if group.matrix.split == "column"
        else (n, k // cut)
        if group.matrix.split == "row"
        else (n, k)
    )
    path = paths(
        asked.question.engine, asked.served.container, group.linear, asked.question.gpu, shape=shape,
        format=group.format, experts=group.matrix.role is Role.EXPERT,
    )  # fmt: skip
    if path.refusal is None:
        return None
    return path.refusal + (f"; instead: {path.remedy}" if path.remedy else "")


def warnings(
    asked: Asked,
    spoken: Dialect,
    config: Mapping[str, Any],
    extra: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[str]:
    """What is probably not meant."""
    title = engines[spoken.engine].title
    for name, instead in spoken.gone.items():
        if name in environment or any(word.partition("=")[0] == name for word in extra):
            yield f"{title} {spoken.version} no longer has {name}; instead: {instead}"
    if asked.question.tp > asked.gpus_per_node:
        yield (
            f"{asked.question.tp} GPUs share each layer, and a machine has {asked.gpus_per_node}: every layer waits "
            f"for the network twice; --tp {asked.gpus_per_node} --pp {asked.nodes} sends less"
        )
    if asked.question.ep and not asked.served.geometry.experts:
        yield "the model has no routed experts to spread"
    if asked.kv is not None and not asked.served.kv_scales and CACHE_MODES[asked.kv].scales != "none":
        yield (
            f"the checkpoint brings no scales for {asked.kv}: they are 1.0, and what is out of reach is cut off; "
            "`narrowcast calibrate-kv` makes them"
        )
    if "auto_map" in config:
        flag = "--trust_remote_code" if spoken.engine == "tensorrt-llm" else "--trust-remote-code"
        yield f"the model comes with code of its own, which {title} runs only with {flag}: read it before you add it"
