"""Cases of the rules about what travels beside the weights."""

from __future__ import annotations

import json
from pathlib import Path

from audit.asking import Ask, Case
from audit.editing import edit_config, parent, quantized

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def instruct(folder: Path) -> Path:
    """A parent with everything that an instruct model has beside its weights."""
    model = parent(folder)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    (model / "preprocessor_config.json").write_text("{}")
    return model


def child(folder: Path) -> Ask:
    """Quantized, with all of it."""
    origin = instruct(folder)
    return Ask(quantized(folder, "fp8_dynamic"), {"against": origin})


def without(name: str, severity: str):
    def make(folder: Path) -> Ask:
        ask = child(folder)
        (ask.model / name).unlink()
        return Ask(ask.model, ask.options, {"tensor": name, "severity": severity})

    return make


def alone(folder: Path) -> Ask:
    """No parent given, nothing missing."""
    return Ask(child(folder).model)


def other_stop(folder: Path) -> Ask:
    ask = child(folder)
    edit_config(ask.model, lambda config: config.update(eos_token_id=2), "generation_config.json")
    facts = {"keys": ["eos_token_id"]}
    return Ask(
        ask.model, ask.options, {"tensor": "generation_config.json", "severity": "warning", "facts": facts}
    )


def other_writer(folder: Path) -> Ask:
    """What the writer says of itself is no difference."""
    ask = child(folder)
    edit_config(
        ask.model, lambda config: config.update(transformers_version="5.24.0"), "generation_config.json"
    )
    return ask


def code(folder: Path) -> Path:
    model = parent(folder)
    edit_config(
        model, lambda config: config.update(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    )
    return model


def no_code(folder: Path) -> Ask:
    return Ask(code(folder), expect={"tensor": "modeling_x.py", "severity": "warning"})


def with_code(folder: Path) -> Ask:
    (code(folder) / "modeling_x.py").write_text("class XForCausalLM: ...\n")
    return Ask(folder / "parent")


CASES = {
    "NC030": Case(without("tokenizer.json", "warning"), child),
    "NC031": Case(without("chat_template.jinja", "warning"), alone),
    "NC032": Case(without("generation_config.json", "warning"), child),
    "NC033": Case(other_stop, other_writer),
    "NC034": Case(without("preprocessor_config.json", "warning"), child),
    "NC035": Case(no_code, with_code),
}
