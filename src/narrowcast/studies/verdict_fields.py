"""What one line of an evaluation's file says of an answer: scores, digests of what was asked, tokens, log-probs.

The names are those of lm-eval's samples, of pass@k records, and of the plain lines that people write themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from math import inf, isfinite
from typing import Any

from narrowcast.errors import UsageError

SCORES = ("score", "correct", "passed", "exact_match", "acc")
_TOKENS = ("token_ids", "prompt_token_ids", "input_ids", "tokens")
LOGPROBS = ("logprob", "logprobs", "token_logprobs", "loglikelihood")
_SHOTS = ("num_fewshot", "n_shot", "fewshot")
_CLUSTERS = ("cluster", "document")
_LM_EVAL = ("filtered_resps", "resps", "doc_hash")
_BOS = re.compile(
    r"\s*(<s>|<bos>|\[BOS\]|<\|begin_of_text\|>|<\|startoftext\|>|<\|endoftext\|>|<｜begin▁of▁sentence｜>)\s*\1"
)


def is_lm_eval(record: Mapping[str, Any]) -> bool:
    return "doc_id" in record and any(key in record for key in _LM_EVAL)


def scores_of(record: Mapping[str, Any], metric: str | None) -> dict[str, float]:
    """What is a number among the metrics of lm-eval or the names a score may have."""
    listed: Any = record.get("metrics")
    own = is_lm_eval(record) and isinstance(listed, list)
    names = [name for name in (listed if own else SCORES) if isinstance(name, str)]
    names += [name for name in metric.split(",") if name not in names] if metric is not None else []
    return {name: _float(record[name]) for name in names if isinstance(record.get(name), bool | int | float)}


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond 1e308
        return inf


def cluster_of(record: Mapping[str, Any], task: str, wanted: str | None, where: str) -> str | None:
    if wanted == "task":
        return task
    document = record.get("doc")
    inner = document if isinstance(document, dict) else {}
    for name in _CLUSTERS if wanted is None else (wanted,):
        found = record.get(name, inner.get(name) if wanted is not None else None)
        if found is not None:
            return digest(found) if isinstance(found, dict | list) else str(found)
    if wanted is not None:
        known = ", ".join([*record, *(f"doc.{name}" for name in inner)])
        raise UsageError(
            "an answer lacks the field that clusters", where=where, got=wanted, wanted=f"one of {known}"[:300]
        )
    return None


def doubled(record: Mapping[str, Any]) -> str:
    """The beginning-of-text token that the prompt's text begins with twice, or nothing."""
    first = (_texts(record.get("arguments")) or [record.get("prompt", "")])[0]
    found = _BOS.match(first) if isinstance(first, str) else None
    return found[1] if found else ""


def _texts(arguments: Any) -> list[str]:
    """The texts among the arguments of lm-eval's requests: {gen_args_0: {arg_0: context, arg_1: continuation}}."""
    rows = (
        arguments.values()
        if isinstance(arguments, dict)
        else arguments
        if isinstance(arguments, list)
        else ()
    )
    found: list[str] = []
    for row in rows:
        parts = row.values() if isinstance(row, dict) else row if isinstance(row, list) else (row,)
        found += [part for part in parts if isinstance(part, str)]
    return found


def facts_of(record: Mapping[str, Any], shots: str | None) -> dict[str, str]:
    arguments, found = record.get("arguments"), {}
    if shots is None:
        shots = next((str(record[key]) for key in _SHOTS if key in record), None)
    if shots is not None:
        found["shots"] = shots
    for name, keys in {
        "question": ("doc_hash",),
        "target": ("target_hash", "target"),
        "prompt": ("prompt_hash", "prompt"),
    }.items():
        value = next((record[key] for key in keys if record.get(key) is not None), None)
        if value is not None:
            found[name] = digest(value)
    if arguments is not None:
        found["request"] = digest(_texts(arguments))
        found["settings"] = digest(_settings(arguments))
    return found


def _settings(arguments: Any) -> list[Any]:
    rows = arguments.values() if isinstance(arguments, dict) else arguments
    return [
        [part for part in (row.values() if isinstance(row, dict) else row) if not isinstance(part, str)]
        for row in (rows if isinstance(rows, Iterable) else ())
        if isinstance(row, dict | list)
    ]


def token_ids(record: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The prompt's token ids; a list of words under one of their names is none."""
    tokens = next((record[key] for key in _TOKENS if isinstance(record.get(key), list)), None)
    if tokens is None or not all(isinstance(token, int) for token in tokens):
        return None
    return tuple(tokens)


def nonfinite(record: Mapping[str, Any]) -> str:
    """The first log-probability that is not finite. Of lm-eval's responses only (log-prob, is greedy) pairs are ones:
    a generated text may well say nan."""
    for key in LOGPROBS:
        for value in _numbers(record.get(key)):
            if not isfinite(value):
                return f"{key} {value}"
    for pair in _pairs(record.get("resps")):
        if not isfinite(pair):
            return f"log-prob {pair}"
    return ""


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, float | int):
        yield _float(value)


def _pairs(value: Any) -> Iterator[float]:
    if isinstance(value, list) and len(value) == 2 and str(value[1]) in ("True", "False"):
        try:
            yield float(value[0])  # lm-eval writes its responses as strings
        except (TypeError, ValueError):
            return
    elif isinstance(value, list):
        for part in value:
            yield from _pairs(part)


def digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
