"""What must be settled before a command has flags, and what speaks against it.

    dtype          the config's, unless it overflows, is missing, or the GPU does not multiply it
    quantization   none for a checkpoint that announces itself; the engine's own name for making a preset while loading
    cache          the engine's word for the mode, whoever's word was typed

Refusals are the engine's, with its reason; warnings are ours.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.engines import engines
from narrowcast.hardware.names import ALIAS, EITHER, METHOD, READS, find
from narrowcast.hardware.overflow import fp16_families
from narrowcast.model.families.fields import Fields
from narrowcast.model.roles import quantization_config
from narrowcast.serving.flags import Asked, Dialect, Flag
from narrowcast.serving.memory import memory
from narrowcast.serving.online import method
from narrowcast.serving.paths import attends, kernels
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.splits import stopped
from narrowcast.serving.traffic import cache_mode
from narrowcast.store.checkpoint import text_config

# Words that engines had for a mode and no longer list, with today's.
OLD_CACHES: Mapping[str, Mapping[str, str]] = {
    "sglang": {"fp4_e2m1": "fp4_mx_block16", "mxfp4": "fp4_mx_block16"}
}
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
    return quantization_config(config).get("scale_fmt") == "ue8m0"


def dtype(served: Served, question: Question, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The dtype to ask for with the reason, or None where the engine takes the config's."""
    gpu, said = question.gpu, served.geometry.dtype
    if config:
        said = Fields(text_config(config), served.geometry.family, outer=config).dtype() or ""
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


@dataclass(frozen=True)
class Quantization:
    """``word`` is the engine's name for what it makes while loading, ``made`` the name of a checkpoint that must be
    made first; both None where the checkpoint announces itself. ``said`` is what to know of it."""

    word: str | None = None
    made: str | None = None
    said: tuple[str, ...] = ()


def quantization(spoken: Dialect, served: Served, question: Question, name: str | None) -> Quantization:
    """How the model becomes what was asked for. UsageError for a name that the engine does not take for it."""
    if name is not None:
        return _named(spoken, served, name)
    if served.preset is None:
        return Quantization()
    word, low = spoken.online.get(served.preset, ("", 0))
    sm = question.gpu.sm
    if word and (sm is None or sm >= low):
        return Quantization(word)
    return Quantization(made=f"{Path(served.name).name}-{served.preset.replace('+', '-')}")


def _named(spoken: Dialect, served: Served, name: str) -> Quantization:
    title = engines[spoken.engine].title
    if not any(row.name == "--quantization" for row in spoken.rows):
        raise UsageError(f"{title}'s server has no flag --quantization", got=name, remedy="--preset NAME")
    row = find(name, spoken.engine, METHOD)[0]
    said: tuple[str, ...] = ()
    unquantized = served.preset is None and not served.quantized
    if not unquantized:
        if row.does in (ALIAS, READS, EITHER) and served.container in row.containers:
            return Quantization(
                said=(f"--quantization {name} is not needed: the checkpoint announces itself",)
            )
        raise UsageError(
            f"the checkpoint is quantized already, as {served.container}", got=f"--quantization {name}",
            wanted="no --quantization: it announces itself",
        )  # fmt: skip
    if row.instead and row.does is not READS:
        instead = row.instead.partition(",")[0]
        text = f"{title} {spoken.version} has {instead} for --quantization {name}"
        said, row = (f"{text}: {row.says}" if row.says else text,), find(instead, spoken.engine, METHOD)[0]
    return Quantization(method(spoken.engine, row.name).name, said=said)


def cache(spoken: Dialect, served: Served, question: Question) -> str | None:
    """The engine's word for the mode that is asked for, or None where it needs none. UsageError for a mode that the
    engine does not have."""
    asked = question.kv.lower()
    if asked == "auto":
        return None
    row = CACHE_MODES[asked]
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


def today(spoken: Dialect, question: Question) -> tuple[Question, tuple[str, ...]]:
    """The question with the engine's word of today for its cache, and what to know of that."""
    new = OLD_CACHES.get(spoken.engine, {}).get(question.kv.lower())
    if new is None:
        return question, ()
    text = f"{engines[spoken.engine].title} {spoken.version} has {new} for --kv-cache-dtype {question.kv}"
    return replace(question, kv=new), (text,)


def refusals(asked: Asked, flags: Sequence[Flag], typed: Collection[str] = ()) -> Iterator[str]:
    """What the engine would stop at: layers without a kernel, each reason once, attention that cannot read the cache,
    and a size that cuts what must stay whole. ``typed`` are flags of the user's own: with another attention backend
    nothing is known."""
    forced = any(flag.name == "--linear-backend" for flag in flags)
    question = asked.question
    said: dict[str, list[str]] = {}
    for row in kernels(asked.served, question):
        text = row.path.refusal
        if text is not None and not (forced and "CUTLASS" in text):
            text += f"; instead: {row.path.remedy}" if row.path.remedy else ""
            said.setdefault(text, []).extend(row.names)
    for text, names in said.items():
        yield f"{', '.join(dict.fromkeys(names))}: {text}"
    if "--attention-backend" not in typed:
        yield from dict.fromkeys(_unread(asked, flags))
    cut = stopped(asked.served, question) if not said else None
    if cut is not None:
        yield f"--tp {question.tp}: {cut}"


def _unread(asked: Asked, flags: Sequence[Flag]) -> Iterator[str]:
    """Attention that is refused over a narrow cache, where no flag is given that mends it."""
    if cache_mode(asked.served, asked.question).name == "bf16":
        return
    given = {" ".join(flag.words) for flag in flags}
    for row in attends(asked.served, asked.question):
        if row.path.refusal is not None and row.path.remedy not in given:
            instead = f"; instead: {row.path.remedy}" if row.path.remedy else ""
            yield f"attention over a KV cache in {row.path.storage}: {row.path.refusal}{instead}"


def warnings(
    asked: Asked,
    spoken: Dialect,
    config: Mapping[str, Any],
    extra: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[str]:
    """What is probably not meant."""
    title = engines[spoken.engine].title
    if memory(asked.served, asked.question).fits is False:
        yield f"it does not fit {asked.question.gpu.name} with what was asked; `narrowcast plan` shows what does"
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
