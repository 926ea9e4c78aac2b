"""Whether what a model writes is JSON, and fits a schema: both models, greedy, the same prompts.

    JSON      the text from its first { or [ on begins with a whole JSON value
    valid     and that value fits the schema (the jsonschema package says so)

The prompt shows the schema and asks for a record about a subject, in the model's own chat template where it has one.
What comes behind the value is not looked at: when to stop is another matter. A model that is at the floor says nothing
about its quantization, and the report says that.

Left out: constrained decoding, which makes every output valid and hides what is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import InputError, UsageError
from narrowcast.runtime.walk import Running
from narrowcast.studies.continuations import end_tokens, write
from narrowcast.studies.evaluation import Structured
from narrowcast.studies.tokens import Tokens

WRITTEN = 128  # tokens
FLOOR = 0.25  # share of valid outputs below which nothing can be told
SUBJECTS = ("a harbour", "a library", "a market", "a railway", "a museum", "a bakery", "a bridge", "a school")


def read_schema(path: str | Path) -> Any:
    """A JSON schema from a file. UsageError without jsonschema, InputError for what is none."""
    try:
        import jsonschema
    except ImportError:
        raise UsageError(
            "schemas need the jsonschema package", where=path, remedy="pip install jsonschema"
        ) from None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except OSError as error:
        raise UsageError("no such schema", where=path, got=error.strerror) from None
    except (ValueError, jsonschema.exceptions.SchemaError) as error:
        got = str(error).split("\n")[0][:200]
        raise InputError("not a JSON schema", where=path, got=got) from None
    return schema


def first_value(text: str) -> tuple[bool, Any]:
    """Whether a whole JSON value begins at the first bracket, and the value."""
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    if not starts:
        return False, None
    try:
        return True, json.JSONDecoder().raw_decode(text, min(starts))[0]
    except (ValueError, RecursionError):
        return False, None


def fits(value: Any, schema: Any) -> bool:
    """Whether a value is valid; references outside the schema are not followed."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema)
    try:
        return bool(kind(schema, registry=Registry()).is_valid(value))
    except Unresolvable as error:
        raise InputError("the schema refers to another one", got=str(error)[:200]) from None


def structured(models: dict[str, Running], tokens: Tokens, path: str | Path) -> Structured:
    """Outputs of both models for every subject; one model in memory at a time."""
    schema = read_schema(path)
    prompts = [_prompt(tokens, schema, subject) for subject in SUBJECTS]
    texts: dict[str, list[str]] = {}
    for name, run in models.items():
        model, ends = run.resident(), end_tokens(run)
        texts[name] = [_written(model, ids, tokens, ends) for ids in prompts]
        del model
    counts = {name: _count(found, schema) for name, found in texts.items()}
    parent = counts.get("parent", (None, None))
    child = counts["child"]
    return Structured(
        len(prompts), parent[0], child[0], parent[1], child[1], _says(len(prompts), parent[1], child[1]),
        texts["child"][0],
    )  # fmt: skip


def _prompt(tokens: Tokens, schema: Any, subject: str) -> list[int]:
    said = json.dumps(schema, separators=(",", ":"))
    text = f"JSON schema:\n{said}\n\nWrite one JSON object about {subject} that fits the schema. Answer with JSON only."
    if getattr(tokens.tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": text}]
        text = tokens.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokens.ids(text, bare=True)
    return tokens.ids(f"{text}\n\n")


def _written(model: Any, ids: Sequence[int], tokens: Tokens, ends: set[int]) -> str:
    found = write(model, torch.tensor([list(ids)]), WRITTEN)[0][0].tolist()
    stop = next((i for i, token in enumerate(found) if token in ends), len(found))
    return tokens.text(found[:stop])


def _count(texts: Sequence[str], schema: Any) -> tuple[int, int]:
    values = [value for is_json, value in map(first_value, texts) if is_json]
    return len(values), sum(fits(value, schema) for value in values)


def _says(total: int, parent: int | None, child: int) -> str:
    if parent is None:
        return f"{child} of {total} valid"
    if max(parent, child) < FLOOR * total:
        return f"both fail ({parent} and {child} of {total} valid): tells nothing"
    return f"valid: parent {parent}, child {child} of {total}"
