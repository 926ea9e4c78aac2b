"""Rules about configs as texts: is it there, is it JSON, does it say one thing only."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.salvage import parsed
from narrowcast.audit.structure_layers import parts
from narrowcast.audit.subject import Subject
from narrowcast.containers.detect import BESIDE
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import CONFIG
from narrowcast.store.magic import wrong_file

_LARGEST = 4 << 20  # bytes; tokenizers and vocabularies are larger and nobody edits them by hand
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
AGAIN = "download or copy the file again"
# Kinds of what every engine reads from a config.json; bool is no int here.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "kv_lora_rank", "q_lora_rank",
            "num_nextn_predict_layers",
        ), (int,),
    ),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "is_encoder_decoder"), (bool,)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "rope_theta", "initializer_range"), (int, float)),
    **dict.fromkeys(("hidden_act", "torch_dtype", "dtype", "transformers_version"), (str,)),
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), (int,)),
    **dict.fromkeys(("vision_config", "audio_config", "rope_scaling", "rope_parameters"), (dict,)),
}  # fmt: skip


_DTYPES = ("bfloat16", "float16", "float32", "float64", "auto")
# Without these, engines take the default of the family's class, which is the size of another model.
_POSITIVE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip


def texts(subject: Subject) -> Iterator[tuple[str, bytes]]:
    """JSON files at the top of the directory that have anything in them, by name."""
    for file in subject.found.files:
        path = subject.root / file
        if len(file.parts) > 1 or file.suffix != ".json":
            continue
        content = _read(path)
        if content:
            yield str(file), content


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.stat().st_size <= _LARGEST else None
    except OSError:
        return None


def _decides(name: str, subject: Subject) -> bool:
    """Whether engines cannot do without this file."""
    return name in (CONFIG, subject.found.index_name, *BESIDE)


@rule("NC006", "error")
def broken_json(subject: Subject) -> Iterator[Finding]:
    """A JSON file does not parse.

    What: config.json, an index, a tokenizer or generation config ends too early, has a comma too many, or is no JSON.
    Why: an engine stops at it, or goes on without it: without generation_config.json with other stop tokens.
    Fix: download or copy the file again; after an edit by hand, look at the place that is named.
    False alarm: a file that only its name makes JSON and that no engine reads; it is a warning then.
    """
    for name, content in texts(subject):
        value, problem = parsed(content)
        other = wrong_file(content[:512])
        page = other is not None and not other.what.startswith("a JSON")  # another rule says what it is
        if page or (value is not None and not (_decides(name, subject) and not isinstance(value, dict))):
            continue
        if value is None and problem is None:
            problem = "null"
        yield Finding(
            "the file is no JSON object", tensor=name, got=problem or f"a {type(value).__name__}", remedy=AGAIN,
            severity=None if _decides(name, subject) else "warning",
        )  # fmt: skip


@rule("NC007", "error")
def doubled_key(subject: Subject) -> Iterator[Finding]:
    """A JSON file has a key twice.

    What: one object in it gives the same key two values, mostly after a merge or an edit by hand.
    Why: Python takes the last one, other readers the first or none: engines see two different configs.
    Fix: remove one of the two.
    False alarm: none known.
    """
    for name, content in texts(subject):
        value, problem = parsed(content)
        if value is not None and problem is not None:
            yield Finding(problem, tensor=name, wanted="every key once", remedy="remove one of the two",
                          severity=None if _decides(name, subject) else "warning")  # fmt: skip


@rule("NC008", "error")
def marked_json(subject: Subject) -> Iterator[Finding]:
    """A JSON file begins with a byte-order mark.

    What: an editor saved it as UTF-8 with a mark, or as UTF-16.
    Why: transformers, and engines that use it, refuse the mark ("Unexpected UTF-8 BOM") or read garbage.
    Fix: save the file as UTF-8 without a mark.
    False alarm: a file that no engine reads.
    """
    for name, content in texts(subject):
        if content.startswith(_MARKS):
            yield Finding(
                "the file begins with a byte-order mark", tensor=name, got=content[:3].hex(" "),
                wanted="UTF-8 without a mark", remedy="save it as UTF-8 without a byte-order mark",
            )  # fmt: skip


@rule("NC009", "error")
def missing_config(subject: Subject) -> Iterator[Finding]:
    """config.json is missing.

    What: the directory has weights and no config.
    Why: no engine knows which model this is or how it is quantized; what is audited here without it is little.
    Fix: copy config.json of the same save beside the weights.
    False alarm: formats that do not need one (Mistral's params.json).
    """
    found = subject.found
    if found.folder and Path(CONFIG) not in (*found.files, *found.links):
        own = Path("params.json") in found.files
        yield Finding(
            "there is no config.json", tensor=CONFIG, wanted="the config.json of the model",
            remedy="copy it beside the weights", severity="warning" if own else None,
        )  # fmt: skip


@rule("NC017", "error")
def wrong_kind(subject: Subject) -> Iterator[Finding]:
    """A value in config.json is of another kind than it must be.

    What: a size is no integer or not positive, a switch no boolean, a dtype no name.
    Why: transformers checks kinds and refuses; engines that do not compute shapes from it and break far from the
    cause, or take any text for true.
    Fix: correct the value, or copy the file again.
    False alarm: families that give a list per layer where others give one number; lists are not told.
    """
    config = subject.config
    for part in (config, text_config(config)) if text_config(config) is not config else (config,):
        for key in _KINDS:
            problem = _unfit(key, part.get(key))
            if problem is not None:
                yield Finding(f"{key} {problem}", tensor=CONFIG, got=repr(part[key])[:60], remedy=AGAIN)


def _unfit(key: str, value: object) -> str | None:
    """Why a value cannot be one of this key; None for null, and for lists, which give one value per layer."""
    kinds = _KINDS[key]
    if value is None or isinstance(value, list):
        return None
    if not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds):
        return f"is no {' or '.join(kind.__name__ for kind in kinds)}"
    if key in ("dtype", "torch_dtype") and str(value).removeprefix("torch.") not in _DTYPES:
        return "is no dtype"
    least = 1 if key in _POSITIVE else -1 if key.endswith("_id") else 0  # -1: no such token
    return "is too small" if isinstance(value, int) and value < least else None


@rule("NC018", "error")
def unnamed_model(subject: Subject) -> Iterator[Finding]:
    """config.json does not say which model this is.

    What: model_type is missing, or architectures is (a warning), or a size that the architecture cannot do without.
    Why: transformers refuses a config without model_type, vLLM and SGLang one without architectures. A size that is
    missing is taken from the family's defaults, which are those of another model.
    Fix: copy config.json of the same save.
    False alarm: models that are loaded by code of their own.
    """
    config, text = subject.config, text_config(subject.config)
    if not config or not subject.found.folder:
        return
    absent = [key for key in ("model_type", "architectures") if not config.get(key)]
    if parts(subject) and text.get("num_hidden_layers"):
        absent += [k for k in ("hidden_size", "num_attention_heads", "vocab_size") if text.get(k) is None]
    for key in absent:
        yield Finding(
            f"{key} is missing",
            tensor=CONFIG,
            severity="warning" if key == "architectures" else None,
            remedy=AGAIN,
        )
