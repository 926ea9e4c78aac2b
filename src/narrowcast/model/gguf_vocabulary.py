"""The tokenizer of a Hugging Face model as GGUF metadata: tokens, kinds, scores or merges, special ids, chat templates.

The inverse of gguf_tokenizer, for the same two algorithms, told apart by what tokenizer.json does:

    byte-level BPE                       gpt2: the pattern that cuts text must be one that llama.cpp knows by a name
    BPE with byte fallback               llama: scores from tokenizer.model, else a token's score is minus the rank of
                                         its first merge, which orders merges as tokenizer.json does

Ids that no token has are filled up to vocab_size, which llama.cpp compares with the embedding.

Left out: slow tokenizers without tokenizer.json; transformers saves one for every family here.

Source: llama.cpp's convert_hf_to_gguf, gguf's vocab.py; sentencepiece_model.proto.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.model.gguf_tokenizer import (
    BYTE,
    CONTROL,
    CUTS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Cut,
    Json,
)

_AT = "tokenizer.ggml."
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ADDED_SCORE = -1000.0


def vocabulary_fields(root: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the tokenizer in a model's folder.

    Raises CheckpointError for files that are missing or do not fit each other, UsageError for a tokenizer that
    llama.cpp does not have.
    """
    tokenizer, settings = _json(root / "tokenizer.json", must=True), _json(root / "tokenizer_config.json")
    model = _object(tokenizer, "model")
    size = _size(tokenizer, model, config)
    if (
        model.get("type") == "BPE"
        and not model.get("byte_fallback")
        and _steps(tokenizer, "decoder", "ByteLevel")
    ):
        fields = _byte_level(tokenizer, model, size)
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        fields = _sentencepiece(root / "tokenizer.model", tokenizer, model, size)
    else:
        raise UsageError(
            "llama.cpp has no tokenizer of this kind for these models", where=root / "tokenizer.json",
            got=model.get("type"), wanted="byte-level BPE, or BPE with byte fallback",
        )  # fmt: skip
    return (
        fields | _specials(fields[_AT + "tokens"], tokenizer, settings, config) | _templates(root, settings)
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError("a tokenizer file cannot be read", where=path, got=str(error)[:80]) from None


def _json(path: Path, must: bool = False) -> Json:
    if not path.is_file():
        if not must:
            return {}
        remedy = "save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise CheckpointError(f"{path.name} is missing", where=path.parent, remedy=remedy)
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("a tokenizer file is no JSON", where=path, got=str(error)[:80]) from None
    if not isinstance(content, dict):
        raise CheckpointError("a tokenizer file is no JSON object", where=path, got=type(content).__name__)
    return content


def _object(content: Mapping[str, Any], key: str) -> Json:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} in tokenizer.json is no object", got=repr(value)[:60])
    return value


def _steps(tokenizer: Json, stage: str, kind: str = "") -> list[Json]:
    """The steps of a stage of tokenizer.json, of one kind."""
    whole = _object(tokenizer, stage)
    inner = (whole.get(key) for key in ("pretokenizers", "normalizers", "decoders", "processors"))
    steps = next((steps for steps in inner if isinstance(steps, list)), [whole])
    return [step for step in steps if isinstance(step, dict) and step and kind in ("", step.get("type"))]


def _numbered(tokenizer: Json, model: Json) -> dict[int, str]:
    vocabulary = _object(model, "vocab")
    found = {number: token for token, number in vocabulary.items() if type(number) is int and number >= 0}
    if len(found) != len(vocabulary):
        raise CheckpointError(
            "the ids in tokenizer.json are not a numbering", got=f"{len(vocabulary)} tokens"
        )
    return found | {number: entry["content"] for number, entry in _added(tokenizer).items()}


def _added(tokenizer: Json) -> dict[int, Json]:
    entries = tokenizer.get("added_tokens") or []
    good = isinstance(entries, list) and all(
        isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str)
        for entry in entries
    )
    if not good:
        raise CheckpointError("added_tokens in tokenizer.json are no list of tokens", got=repr(entries)[:60])
    return {entry["id"]: entry for entry in entries}


def _size(tokenizer: Json, model: Json, config: Mapping[str, Any]) -> int:
    most, size = max(_numbered(tokenizer, model), default=-1) + 1, config.get("vocab_size")
    if type(size) is not int or most > size:
        raise CheckpointError(
            "the tokenizer has more tokens than the embedding has rows", got=most, wanted=f"vocab_size = {size}",
            remedy="resize the embedding, or remove the tokens that were added without it",
        )  # fmt: skip
    return size


def _filled(size: int) -> tuple[list[str], list[int]]:
    return [f"[PAD{number}]" for number in range(size)], [UNUSED] * size


def _byte_level(tokenizer: Json, model: Json, size: int) -> dict[str, Any]:
    tokens, kinds = _filled(size)
    for number, token in _numbered(tokenizer, model).items():
        tokens[number], kinds[number] = token, NORMAL
    _mark_added(tokenizer, tokens, kinds)
    return {
        _AT + "model": "gpt2",
        _AT + "pre": cut_name(tokenizer, bool(model.get("ignore_merges"))),
        _AT + "tokens": tokens,
        _AT + "token_type": kinds,
        _AT + "merges": [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in _merges(model)],
    }


def _mark_added(tokenizer: Json, tokens: list[str], kinds: list[int]) -> None:
    """Kinds and spelling of added tokens: control tokens, and those found in a text as they are."""
    for number, entry in _added(tokenizer).items():
        token = entry["content"]
        control = entry.get("special") or _looks_special(token)
        kinds[number] = CONTROL if control else USER_DEFINED
        tokens[number] = token if control else token.replace(SPACE, " ")


def _looks_special(token: str) -> bool:
    """Tokens that some models add without calling them special, as llama.cpp's converter knows them."""
    if token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]"):
        return True
    pairs = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return any(token.startswith(start) and token.endswith(end) for start, end in pairs)


def _merges(model: Json) -> list[tuple[str, str]]:
    merges = model.get("merges")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges or []]
    if not isinstance(merges, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise CheckpointError("the merges in tokenizer.json are no pairs", got=repr(merges)[:60])
    return [(str(left), str(right)) for left, right in pairs]


def cut_name(tokenizer: Json, whole: bool) -> str:
    """llama.cpp's name of the way in which a tokenizer.json cuts text before byte-level BPE."""
    pattern, digits, others = None, False, []
    for step in _steps(tokenizer, "pre_tokenizer"):
        split = (step.get("behavior"), bool(step.get("invert")))
        if (
            step.get("type") == "Split"
            and split in (("Isolated", False), ("Removed", True))
            and pattern is None
        ):
            pattern = _object(step, "pattern").get("Regex")
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            digits = True
        elif step.get("type") != "ByteLevel" or step.get("add_prefix_space"):
            others.append(step.get("type"))
    nfc = bool(_steps(tokenizer, "normalizer", "NFC"))
    for name, cut in CUTS.items():
        if not others and (cut.pattern, cut.digits) == (pattern, digits) and _fits(cut, whole, nfc):
            return name
    raise UsageError(
        "llama.cpp has no name for the way in which this tokenizer cuts text",
        got=", ".join(map(str, others)) or pattern or "no pattern",
        wanted=f"that of {', '.join(CUTS)}",
    )


def _fits(cut: Cut, whole: bool, nfc: bool) -> bool:
    return cut.whole == whole and (cut.nfc == nfc or not nfc)


def _sentencepiece(path: Path, tokenizer: Json, model: Json, size: int) -> dict[str, Any]:
    tokens, kinds = _filled(size)
    scores = [-10000.0] * size
    pieces = _pieces(path) if path.is_file() else _ranked(tokenizer, model)
    for number, (token, score, kind) in pieces:
        if number < size:
            tokens[number], scores[number], kinds[number] = token, score, kind
    added = {number for number in _added(tokenizer) if kinds[number] != UNKNOWN}
    unknown = [number for number, kind in enumerate(kinds) if kind == UNKNOWN]
    _mark_added(tokenizer, tokens, kinds)
    for number in unknown:
        kinds[number] = UNKNOWN
    for number in added:
        scores[number] = _ADDED_SCORE
    prefix = [*_steps(tokenizer, "normalizer", "Prepend"), *_steps(tokenizer, "pre_tokenizer", "Metaspace")]
    return {
        _AT + "model": "llama",
        _AT + "pre": "default",
        _AT + "tokens": tokens,
        _AT + "scores": np.array(scores, np.float32),
        _AT + "token_type": kinds,
        _AT + "add_space_prefix": any(step.get("prepend_scheme", "always") != "never" for step in prefix),
    }


Piece = tuple[str, float, int]


def _ranked(tokenizer: Json, model: Json) -> Iterator[tuple[int, Piece]]:
    """Pieces from tokenizer.json alone, scored so that they merge in its order."""
    ranks: dict[str, int] = {}
    merges = _merges(model)
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    for number, token in _numbered(tokenizer, model).items():
        byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        kind = BYTE if byte else UNKNOWN if token == model.get("unk_token") else NORMAL
        yield number, (token, -float(ranks.get(token, len(merges))), kind)


def _pieces(path: Path) -> Iterator[tuple[int, Piece]]:
    """Pieces of a SentencePiece model, whose kinds have the numbers of GGUF's."""
    raw = path.read_bytes()
    try:
        content = list(_messages(raw))
        training = [dict(_messages(value)) for field, value in content if field == 2]
        pieces = [dict(_messages(value)) for field, value in content if field == 1]
        named = [
            (piece[1].decode("utf-8"), piece.get(2, b"\0\0\0\0"), piece.get(3, NORMAL)) for piece in pieces
        ]
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError("this is no SentencePiece model", where=path, got=str(error)[:80]) from None
    if any(block.get(3, 1) != 2 for block in training):
        raise UsageError(
            "llama.cpp's tokenizer of this name is BPE", where=path, got="a Unigram model", wanted="BPE"
        )
    for number, (token, score, kind) in enumerate(named):
        yield number, (token, struct.unpack("<f", score)[0], kind)


def _messages(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: whole numbers, or bytes of everything else."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        size, at = _varint(raw, at) if wire == 2 else (8 if wire == 1 else 4, at)
        if size > len(raw) - at:
            raise ValueError("a field beyond the end")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number beyond 64 bits")


def _specials(
    tokens: list[str], tokenizer: Json, settings: Json, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Ids of special tokens, and which of them frame a text."""
    numbers = {token: number for number, token in reversed(list(enumerate(tokens)))}
    found: dict[str, Any] = {}
    for role, key in _ROLES.items():
        said = settings.get(f"{role}_token")
        content = said.get("content") if isinstance(said, dict) else said
        number = numbers.get(content) if isinstance(content, str) else None
        if number is None and type(config.get(f"{role}_token_id")) is int:
            number = config[f"{role}_token_id"]
        if number is not None and 0 <= number < len(tokens):
            found[f"{_AT}{key}_token_id"] = number
    for role, at in (("bos", 0), ("eos", -1)):
        said = settings.get(f"add_{role}_token")
        found[f"{_AT}add_{role}_token"] = said if isinstance(said, bool) else _framed(tokenizer, at)
    return found


def _framed(tokenizer: Json, at: int) -> bool:
    """Whether tokenizer.json puts a special token at the begin (0) or end (-1) of a text."""
    singles = [step.get("single") for step in _steps(tokenizer, "post_processor", "TemplateProcessing")]
    return any(
        isinstance(single, list) and single and "SpecialToken" in str(single[at]) for single in singles
    )


def _templates(root: Path, settings: Json) -> dict[str, Any]:
    """Chat templates from tokenizer_config.json or from files of their own."""
    said = settings.get("chat_template")
    if isinstance(said, list):
        named = {str(entry.get("name")): entry.get("template") for entry in said if isinstance(entry, dict)}
    else:
        named = {"default": said}
    files = [("default", root / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((root / "additional_chat_templates").glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            named[name] = _text(path)
    key = "tokenizer.chat_template"
    return {
        key if name == "default" else f"{key}.{name}": text
        for name, text in named.items()
        if isinstance(text, str)
    }
