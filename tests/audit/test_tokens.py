"""Two tokenizer.json make the same tokens or not: what another release spells in another way, held against the library
itself."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from narrowcast.audit.files_tokens import token_keys

TEXT = "hug hugs, the pug </s> hug"
BASE: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "added_tokens": [
        {"id": 13, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ],
    "model": {
        "type": "BPE", "dropout": None, "unk_token": "?", "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "merges": ["u g", "h ug"],
        "vocab": {c: i for i, c in enumerate(["?", "h", "u", "g", "s", "p", "t", "e", ",", "Ġ", "ug", "hug", "</w>"])},
    },
}  # fmt: skip
BARE = {
    "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {},
}  # fmt: skip
ENDING = BARE | {
    "single": [*BARE["single"], {"SpecialToken": {"id": "</s>", "type_id": 0}}],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [13], "tokens": ["</s>"]}},
}  # fmt: skip
OFFSETS = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def changed(path: str, value: Any) -> dict[str, Any]:
    new = copy.deepcopy(BASE)
    *way, last = path.split(".")
    inner = new
    for key in way:
        inner = inner[int(key) if key.isdigit() else key]
    if value is None and last == "dropout":
        del inner[last]
    else:
        inner[last] = value
    return new


@pytest.mark.parametrize(
    ("path", "value", "keys"),
    [
        ("post_processor", BARE, []),
        ("post_processor", OFFSETS, []),
        ("post_processor", {"type": "Sequence", "processors": [OFFSETS, BARE]}, []),
        ("model.merges", [["u", "g"], ["h", "ug"]], []),
        ("model.dropout", None, []),
        ("padding", {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "?"}, None),
        ("post_processor", ENDING, ["post_processor"]),
        ("model.merges", [["u", "g"]], ["model"]),
        ("normalizer", {"type": "Lowercase"}, None),
        ("pre_tokenizer.add_prefix_space", True, ["pre_tokenizer"]),
        ("added_tokens.0.lstrip", True, ["added_tokens"]),
    ],
)  # fmt: skip
def test_same_tokens(path: str, value: Any, keys: list[str] | None) -> None:
    """``keys`` None: the ids of this text do not decide, since padding is set by engines and nothing is upper case."""
    other = changed(path, value)
    if keys is None:
        assert token_keys(other, BASE) == ([] if path == "padding" else [path])
        return
    assert token_keys(other, BASE) == keys == token_keys(BASE, other)
    one, two = (Tokenizer.from_str(json.dumps(each)).encode(TEXT).ids for each in (BASE, other))
    assert (one == two) is (not keys)


def test_nonsense_is_compared_too() -> None:
    assert token_keys({"model": 3, "added_tokens": {}}, {"model": {"merges": [1]}}) == ["model"]
