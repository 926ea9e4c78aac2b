"""Whether two tokenizer.json make the same tokens: what is compared, and what is only spelled in another way.

    text --normalizer--> --pre_tokenizer--> --model, added_tokens--> --post_processor--> ids --decoder--> text

Every release of transformers and tokenizers saves the file in its own manner: defaults are written out or left out,
merges are pairs or lines, a post-processor that adds nothing is there or null. None of it changes an id. Padding and
truncation are what an engine sets itself.
"""

from __future__ import annotations

from typing import Any

IDLE = frozenset({"version", "truncation", "padding"})


def token_keys(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The keys at the top of two tokenizer.json in which they make other tokens, or other text of them."""
    a, b = _meant(ours), _meant(theirs)
    return sorted(key for key in {**a, **b} if a.get(key) != b.get(key))


def _meant(tokenizer: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in tokenizer.items() if key not in IDLE}
    found["model"] = _model(found.get("model"))
    found["post_processor"] = _adding(found.get("post_processor"))
    found["added_tokens"] = [_without_defaults(token) for token in _list(found.get("added_tokens"))]
    return found


def _model(model: Any) -> Any:
    """A model with merges as pairs and without keys that say the default."""
    model = _without_defaults(model)
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        model["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    return model


def _adding(processor: Any) -> Any:
    """A post-processor as far as it adds tokens: offsets alone are trimmed by ByteLevel, and a template without
    special tokens adds none."""
    if not isinstance(processor, dict):
        return processor
    if processor.get("type") == "ByteLevel":
        return None
    if processor.get("type") == "Sequence":
        parts = [part for one in _list(processor.get("processors")) if (part := _adding(one)) is not None]
        return parts[0] if len(parts) == 1 else parts or None
    template = processor.get("type") == "TemplateProcessing"
    if template and not processor.get("special_tokens"):
        return None
    return processor


def _without_defaults(value: Any) -> Any:
    """An object without the keys that say null, false or an empty text."""
    if not isinstance(value, dict):
        return value
    return {key: said for key, said in value.items() if not (said is None or said is False or said == "")}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
