"""Rules about the whole: heads and embeddings, towers and prediction layers, against what the config says is there.

They go by raw names, so that a layer which its container refuses is still a layer that is there, and keep still
where a shard is missing or damaged: then everything that is not here may be in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.jobs.matching import Held
from narrowcast.model.modules import is_output_head, is_token_embedding
from narrowcast.model.roles import Role, find_place
from narrowcast.store.checkpoint import text_config

_ROWS = 1 << 12  # of a head that are compared at once
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Architectures whose config class has tie_word_embeddings False by default, and leaves defaults out of config.json
# (transformers 5.24).
UNTIED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "DeepseekV3", "Phi3",
        "GptOss", "Glm4", "Glm4Moe", "Olmo2", "Granite", "MiniMaxM2",
    )
)  # fmt: skip
_PREDICT = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def tie(config: dict[str, Any]) -> bool | None:
    """What the config says of tied embeddings, at its top or in its text part. Where it is silent the default of the
    architecture counts; None where that is not known."""
    parts = [config, text_config(config)]
    said = [p["tie_word_embeddings"] for p in parts if isinstance(p.get("tie_word_embeddings"), bool)]
    if said:
        return all(said)
    names = config.get("architectures")
    return False if isinstance(names, list) and names and names[0] in UNTIED else None


def generates(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_GENERATES) for name in names)


def heads(subject: Subject) -> list[str]:
    """Modules that are the output head of the text model."""
    return [name for name in subject.found.modules if is_output_head(f"{name}.weight", subject.config)]


def embeddings(subject: Subject) -> list[str]:
    """Modules that are the token embedding of the text model."""
    config = subject.config
    return [
        name for name in subject.found.modules
        if is_token_embedding(f"{name}.weight") and find_place(f"{name}.weight", config) is None
    ]  # fmt: skip


@rule("NC410", "error", reads="codes")
def stored_tied_head(subject: Subject) -> Iterator[Finding]:
    """The config ties the head to the embedding, and the file has another head.

    What: tie_word_embeddings is true, and a stored lm_head has other values than the embedding, or is quantized while
    the embedding is plain.
    Why: engines that tie ignore the stored head, or load it over the embedding; others use it. They compute different
    models from one file.
    Fix: set tie_word_embeddings to false where the head was trained or quantized apart, else remove the head.
    False alarm: none known; a head with the same bytes is not told.
    """
    head, table = heads(subject), embeddings(subject)
    if tie(subject.config) is not True or not head or not table or subject.container == "gguf":
        return
    a, b = subject.held.get(head[0]), subject.held.get(min(table, key=len))
    if a is None or b is None:
        return
    if a.scheme != b.scheme or a.shape != b.shape:
        said = (
            f"the config ties the head, and the file has one as {a.scheme} beside the embedding as {b.scheme}"
        )
    elif _equal(a, b):
        return
    else:
        said = "the config ties the head, and the file has one with other values than the embedding"
    yield Finding(
        said, tensor=a.name, got=f"{a.scheme} {list(a.shape)}", wanted=f"{b.scheme} {list(b.shape)}, as {b.name}",
        remedy="set tie_word_embeddings to false if the head is to count, else remove it",
    )  # fmt: skip


def _equal(a: Held, b: Held) -> bool:
    """Whether two matrices of one shape have the same stored elements."""
    n = a.source.shape[0]
    return all(
        np.array_equal(a.stored(i, min(i + _ROWS, n)), b.stored(i, min(i + _ROWS, n)))
        for i in range(0, n, _ROWS)
    )


@rule("NC411", "error")
def missing_head(subject: Subject) -> Iterator[Finding]:
    """The model has no output head, and none is tied.

    What: a model that generates text, tie_word_embeddings false (or left out, where that is the architecture's
    default), and no lm_head in the file; or a head is tied to an embedding that the file does not have.
    Why: the head is then random or zero, and the model prints one token for ever, often question marks or
    exclamation marks.
    Fix: copy the head from the parent, or set tie_word_embeddings to true if the parent is tied.
    False alarm: models without a head that only call themselves ForCausalLM (embedders).
    """
    found = subject.found
    if not found.whole or not generates(subject.config) or not found.modules:
        return
    tied, head, table = tie(subject.config), heads(subject), embeddings(subject)
    said = "tie_word_embeddings" in {**subject.config, **text_config(subject.config)}
    if tied is False and not head and table:
        yield Finding(
            f"tie_word_embeddings is {'false' if said else 'not set'} and the file has no output head",
            tensor="lm_head.weight", got="no head",
            wanted="a stored head, or tie_word_embeddings true", remedy="copy the head from the parent",
        )  # fmt: skip
    if tied is True and not head and not table:
        yield Finding(
            "the head is tied to an embedding that the file does not have", tensor="model.embed_tokens.weight",
            got="no token embedding", remedy="copy the embedding from the parent",
        )  # fmt: skip


@rule("NC412", "error")
def quantized_tied_embedding(subject: Subject) -> Iterator[Finding]:
    """An embedding that is also the output head is quantized.

    What: head and embedding are tied, and their one tensor is in codes. Ignoring lm_head does not prevent it, since no
    tensor is called so.
    Why: engines look rows up in a plain table and take the codes for numbers; such a model loads without an error
    and prints question marks.
    Fix: quantize again with the embedding left out; `narrowcast quantize` never takes a tied one.
    False alarm: GGUF files, whose readers decode rows, are not told. Integers in compressed-tensors are a warning:
    vLLM decodes them, transformers does not.
    """
    tied, head = tie(subject.config), heads(subject)
    if tied is False or head or subject.container == "gguf" or not (tied or generates(subject.config)):
        return
    for name in embeddings(subject):
        one = subject.quantized.get(name)
        if one is not None:
            integers = one.scheme.startswith(("int", "uint")) and subject.container == "compressed-tensors"
            yield Finding(
                "the tied embedding, which is the output head too, is quantized", tensor=name, got=one.scheme,
                wanted="a plain table", severity="warning" if integers else None,
                remedy="quantize again from the parent: narrowcast leaves tied embeddings alone",
            )  # fmt: skip


@rule("NC413", "error")
def other_vocabulary(subject: Subject) -> Iterator[Finding]:
    """Rows of the embedding or the head are not vocab_size.

    What: the table or the head has fewer or more rows than the config's vocab_size.
    Why: vLLM and transformers refuse another number; an engine that does not reads past the end for the last tokens.
    Fix: take config and weights from the same save; after tokens were added, write the new vocab_size.
    False alarm: models whose vocab_size counts another vocabulary than the text's.
    """
    text = text_config(subject.config)
    size = text.get("vocab_size")
    if not isinstance(size, int) or subject.config.get("is_encoder_decoder"):
        return
    for name in [*embeddings(subject), *(heads(subject) if generates(subject.config) else [])]:
        one = subject.held.get(name)
        if one is not None and len(one.shape) == 2 and one.shape[0] != size:
            yield Finding(
                "the table has another number of rows than vocab_size", tensor=name, got=f"{one.shape[0]} rows",
                wanted=f"{size} rows", remedy="take config.json and weights from the same save",
            )  # fmt: skip


@rule("NC430", "warning")
def missing_prediction(subject: Subject) -> Iterator[Finding]:
    """The config promises multi-token prediction layers that are not there.

    What: num_nextn_predict_layers (or its like) is above 0, and no tensor is of such a layer.
    Why: transformers drops these layers when it loads a model, so tools built on it lose them. The model answers as
    before, but an engine that is told to draft with them stops, or starts with random ones.
    Fix: copy the layers from the parent, or set the number to 0.
    False alarm: families whose prediction layers are published as a model of their own.
    """
    text = text_config(subject.config)
    key = next((k for k in _PREDICT if isinstance(text.get(k), int) and text[k] > 0), None)
    if key is None or not subject.found.whole or not subject.found.modules:
        return
    if not _has(subject, Role.MTP):
        yield Finding(
            f"{key} is {text[key]}, and no tensor is of a prediction layer", tensor="config.json", got="none",
            wanted=f"{text[key]} layers", remedy=f"copy them from the parent, or set {key} to 0",
        )  # fmt: skip


@rule("NC431", "warning")
def missing_tower(subject: Subject) -> Iterator[Finding]:
    """The config describes a vision or audio tower that is not there.

    What: vision_config or audio_config is given, and no tensor's name is of such a tower.
    Why: an engine that builds the model from its config stops, or fills the tower with random numbers and answers
    about pictures that it does not see.
    Fix: copy the tower from the parent; for a text-only model take the text part's architecture and config.
    False alarm: towers whose names are not known here.
    """
    if not subject.found.whole or not subject.found.modules:
        return
    for key, role in (("vision_config", Role.VISION), ("audio_config", Role.AUDIO)):
        if isinstance(subject.config.get(key), dict) and subject.config[key] and not _has(subject, role):
            other = [name for name in subject.found.modules if name.startswith(key.partition("_")[0])]
            if not other:
                yield Finding(
                    f"{key} is given, and no tensor is of such a tower", tensor="config.json", got="none",
                    wanted=f"tensors of role {role}", remedy="copy the tower from the parent",
                )  # fmt: skip


def _has(subject: Subject, role: Role) -> bool:
    config = subject.config
    places = (find_place(name, config) for name in subject.found.modules)
    return any(place is not None and place.role is role for place in places)
