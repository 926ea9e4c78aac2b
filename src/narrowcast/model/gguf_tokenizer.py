"""The tokenizer of a GGUF file as Hugging Face files: tokenizer.json, tokenizer_config.json, the chat templates and
generation_config.json.

A GGUF file names an algorithm and stores its tables; how text is cut before the tables apply is code in llama.cpp,
known by a name. Two algorithms cover the families that are converted here:

    gpt2    byte-level BPE: tokens, merges, and in ``pre`` the name of the pattern that cuts text
    llama   SentencePiece BPE: tokens with scores; the pair of neighbours whose union scores best is merged first

Merges of the second kind are not in the file. They follow from the tokens: every cut of a token into two others is a
merge, as good as the token's score (for Gemma, whose scores do not follow its merges, as the token is early).

Text is cut as the models' own tokenizer.json does, which is what llama.cpp imitates.

Left out: other algorithms (WordPiece, Unigram, RWKV) and patterns of other families, each refused by name.

Source: llama.cpp src/llama-vocab.cpp; the tokenizer.json files of the models; transformers 5.24 gguf_tokenizer_mapping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.errors import CheckpointError, UsageError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
_CASED += rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


@dataclass(frozen=True)
class Cut:
    """How text is cut before byte-level BPE: by a pattern, or by GPT-2's own, with digits one by one. With ``whole`` a
    piece that is a token is taken without merging; with ``bos`` a text begins with that token."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


LLAMA3, QWEN2 = _WORDS % "{1,3}", _WORDS % ""
GPT4O, TEKKEN = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}"), _CASED % ("", "", "")
CUTS: Mapping[str, Cut] = {
    "llama-bpe": Cut(LLAMA3, whole=True, bos=True),
    "llama3": Cut(LLAMA3, whole=True, bos=True),
    "llama-v3": Cut(LLAMA3, whole=True, bos=True),
    "dbrx": Cut(LLAMA3),
    "smaug-bpe": Cut(LLAMA3),
    "qwen2": Cut(QWEN2, nfc=True),
    "deepseek-r1-qwen": Cut(QWEN2),
    "gpt-4o": Cut(GPT4O),
    "tekken": Cut(TEKKEN, whole=True, bos=True),
    "smollm": Cut(digits=True),
    "gpt-2": Cut(),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
_AT = "tokenizer.ggml."
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
Json = dict[str, Any]


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the tokenizer in the metadata of a GGUF file, by name.

    Raises UsageError for an algorithm or pattern that is not known here, CheckpointError for tables that do not fit.
    """
    tokens, kinds = _tokens(fields)
    model = fields.get(_AT + "model")
    if model == "gpt2":
        tokenizer = _byte_level(fields, tokens, kinds)
    elif model == "llama":
        tokenizer = _sentencepiece(fields, tokens, kinds)
    else:
        remedy = "take the tokenizer's files from the model that the GGUF was made of"
        raise UsageError(
            "no table for this tokenizer of a GGUF file", got=model, wanted="gpt2, llama", remedy=remedy
        )
    roles = _roles(fields, len(tokens))
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _settings(fields, tokens, roles, tokenizer),
    }
    files["generation_config.json"] = _generation(fields, roles)
    found = {
        name: json.dumps(content, ensure_ascii=False).encode() + b"\n" for name, content in files.items()
    }
    return found | _templates(fields)


def _tokens(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens as tokenizer.json spells them, and their kinds; those that only fill up the vocabulary are UNUSED."""
    tokens = fields.get(_AT + "tokens")
    if not isinstance(tokens, list):
        raise CheckpointError("the GGUF file has no vocabulary", wanted=_AT + "tokens")
    kinds = fields.get(_AT + "token_type", np.ones(len(tokens), np.int32))
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise CheckpointError(
            "token types and tokens do not fit", got=type(kinds).__name__, wanted=f"{len(tokens)} types"
        )
    found = list(map(int, kinds))
    for number, token in enumerate(tokens):
        if token == f"[PAD{number}]":
            found[number] = UNUSED
    if (
        fields.get(_AT + "model") == "llama"
    ):  # runs of spaces are stored as they are matched, not as they are spelled
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    used = [token for token, kind in zip(tokens, found, strict=True) if kind != UNUSED]
    if len(set(used)) != len(used):
        seen: set[str] = set()
        twice = next(token for token in used if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise CheckpointError(f"the vocabulary has the token {twice!r} twice", wanted="every token once")
    return tokens, found


def _roles(fields: Mapping[str, Any], size: int) -> dict[str, int]:
    """Token ids by role: bos, eos, unk, pad, and eot where a turn ends with another token."""
    found = {}
    for role, key in (*_ROLES.items(), ("eot", "eot")):
        number = fields.get(f"{_AT}{key}_token_id")
        if number is None or number == 2**32 - 1:
            continue
        if type(number) is not int or not 0 <= number < size:
            raise CheckpointError(
                f"the {key} token is not in the vocabulary", got=number, wanted=f"0 to {size - 1}"
            )
        found[role] = number
    return found


def _byte_level(fields: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Json:
    name = str(fields.get(_AT + "pre"))
    if name not in CUTS:
        raise UsageError(
            "it is not known here how this GGUF file's tokenizer cuts text", got=f"{_AT}pre = {name}",
            wanted=", ".join(CUTS), remedy="take the tokenizer's files from the model that the GGUF was made of",
        )  # fmt: skip
    cut = CUTS[name]
    merges = fields.get(_AT + "merges")
    if not isinstance(merges, list):
        raise CheckpointError("the GGUF file has no merges", wanted=_AT + "merges")
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": cut.whole,
    }
    return _tokenizer(
        {"type": "NFC"} if cut.nfc else None,
        _cutter(cut),
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model | {"vocab": _vocabulary(tokens, kinds), "merges": merges},
        _frame(fields, tokens, bos=cut.bos),
        _added(tokens, kinds),
    )


def _cutter(cut: Cut) -> Json:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": not cut.pattern,
    }
    if cut.pattern:
        split = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, byte_level]}
    digits = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, byte_level]} if cut.digits else byte_level


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Json:
    prefix = bool(fields.get(_AT + "add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefix else [spaces]
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[Json] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    model: Json = {"type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    vocabulary = _vocabulary(tokens, kinds)
    return _tokenizer(
        {"type": "Sequence", "normalizers": normalizers},
        None,
        {"type": "Sequence", "decoders": decoders},
        model | {"vocab": vocabulary, "merges": _merges(fields, tokens, kinds)},
        _frame(fields, tokens, bos=True),
        _added(tokens, kinds),
    )


def _merges(fields: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> list[list[str]]:
    """Every cut of a token into two others, best token first; cuts of one token in the order of their parts."""
    scores = fields.get(_AT + "scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise CheckpointError(
            "scores and tokens do not fit", got=type(scores).__name__, wanted=f"{len(tokens)} scores"
        )
    parts = {token: i for i, token in enumerate(tokens) if kinds[i] in (NORMAL, USER_DEFINED)}
    early = str(fields.get("general.architecture")).startswith("gemma")
    order = parts.values() if early else sorted(parts.values(), key=lambda i: (-scores[i], i))
    merges = []
    for i in order:
        token = tokens[i]
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in parts and cut[1] in parts]
        merges += [list(cut) for cut in sorted(known, key=lambda cut: (parts[cut[0]], parts[cut[1]]))]
    return merges


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}


def _added(tokens: list[str], kinds: list[int]) -> list[Json]:
    """Tokens that are found in the text before it is cut: control tokens and those a user defined."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, **plain, "special": kinds[i] != USER_DEFINED}
        for i, token in enumerate(tokens)
        if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _frame(fields: Mapping[str, Any], tokens: list[str], bos: bool) -> Json | None:
    """What is put around a text: the begin token, the end token, both or none."""
    roles = _roles(fields, len(tokens))
    before = [roles["bos"]] if fields.get(_AT + "add_bos_token", bos) and "bos" in roles else []
    after = [roles["eos"]] if fields.get(_AT + "add_eos_token", False) and "eos" in roles else []
    if not before and not after:
        return None

    def framed(letter: str, number: int) -> list[Json]:
        def special(i: int) -> Json:
            return {"SpecialToken": {"id": tokens[i], "type_id": number}}

        sequence = {"Sequence": {"id": letter, "type_id": number}}
        return [*map(special, before), sequence, *map(special, after)]

    names = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (*before, *after)}
    pair = framed("A", 0) + framed("B", 1)
    return {"type": "TemplateProcessing", "single": framed("A", 0), "pair": pair, "special_tokens": names}


def _tokenizer(
    normalizer: Json | None,
    cutter: Json | None,
    decoder: Json,
    model: Json,
    frame: Json | None,
    added: list[Json],
) -> Json:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": cutter, "post_processor": frame, "decoder": decoder, "model": model,
    }  # fmt: skip


def _settings(fields: Mapping[str, Any], tokens: list[str], roles: dict[str, int], tokenizer: Json) -> Json:
    single = (tokenizer["post_processor"] or {}).get("single", [{}, {}])
    settings: Json = {
        "add_bos_token": "SpecialToken" in single[0],
        "add_eos_token": "SpecialToken" in single[-1],
    }
    settings |= {f"{role}_token": tokens[roles[role]] for role in _ROLES if role in roles}
    settings |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    context = fields.get(f"{fields.get('general.architecture')}.context_length")
    return settings | ({"model_max_length": context} if isinstance(context, int) else {})


def _generation(fields: Mapping[str, Any], roles: dict[str, int]) -> Json:
    """Token ids for generating text: it ends with the end token, or with the end of a turn."""
    ends = [roles[role] for role in ("eos", "eot") if role in roles]
    ids: Json = {f"{role}_token_id": roles[role] for role in ("bos", "pad") if role in roles}
    if ends:
        ids["eos_token_id"] = ends if len(set(ends)) > 1 else ends[0]
    return {"_from_model_config": True, **ids}


def _templates(fields: Mapping[str, Any]) -> dict[str, bytes]:
    found = {}
    for key, text in fields.items():
        named = re.fullmatch(r"tokenizer\.chat_template(?:\.([\w-]+))?", key)
        if named and isinstance(text, str):
            name = f"additional_chat_templates/{named[1]}.jinja" if named[1] else "chat_template.jinja"
            found[name] = text.encode()
    return found
