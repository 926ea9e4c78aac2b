"""Rules about what travels beside the weights: tokenizer, chat template, generation config, code.

Without a parent their absence is only told, since base models have no template and many tools are given a tokenizer
apart. With a parent, what it has and the checkpoint has not was lost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowcast.audit.files_tokens import token_keys
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.salvage import parsed
from narrowcast.audit.subject import Subject
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import CONFIG, some

GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
_TOKENIZERS = re.compile(
    r"(tokenizer\.(json|model(\.v\d+)?)|tekken\.json|vocab\.(json|txt)|\w*(spm|spiece|sentencepiece)\w*\.model"
    r"|.*\.tiktoken|tokenization_\w+\.py)$"
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# What processors and loaders cannot do without, where the parent has it.
_NEEDED = re.compile(
    r"(\w*processor_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt)$"
)
# What writers put into these files about themselves.
_WRITERS = frozenset(
    {"transformers_version", "_from_model_config", "_name_or_path", "name_or_path", "_commit_hash"}
)
# Keys of tokenizer_config.json that change ids, where both sides say them.
_SWITCHES = ("add_bos_token", "add_eos_token", "do_lower_case")
_STOPS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")


def _beside(checkpoint: Checkpoint) -> set[str]:
    """Names of files at the top of a checkpoint directory."""
    return {file.name for file in checkpoint.side_files if len(file.parts) == 1}


def _parent(subject: Subject) -> Checkpoint | None:
    """The parent, where it is a directory of files."""
    found = subject.parent.checkpoint if subject.parent is not None else None
    return found if found is not None and found.side_files else None


def _generates(subject: Subject) -> bool:
    names = subject.config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_GENERATES) for name in names)


def _object(root: Path, name: str) -> dict[str, Any]:
    """A JSON object of a directory; empty where there is none."""
    try:
        value = parsed((root / name).read_bytes())[0]
    except OSError:
        return {}
    return value if isinstance(value, dict) else {}


def _template(checkpoint: Checkpoint) -> Any:
    """The chat template, wherever it is kept; None where there is none."""
    for name in _TEMPLATES:
        if (checkpoint.root / name).is_file():
            content = (checkpoint.root / name).read_bytes()
            return parsed(content)[0] if name.endswith(".json") else content.decode("utf-8", "replace")
    return _object(checkpoint.root, TOKENIZER_CONFIG).get("chat_template")


def _lost(subject: Subject, name: str, what: str, why: str, has: bool, parent_has: bool) -> Iterator[Finding]:
    """One finding where something is absent: a warning where the parent has it, else an information."""
    if has:
        return
    parent = _parent(subject)
    if parent is not None and parent_has:
        yield Finding(
            f"{what} is missing, and the parent has it", tensor=name, severity="warning",
            remedy=f"copy it from {parent.root}",
        )  # fmt: skip
    elif parent is None:
        yield Finding(f"{what} is missing: {why}", tensor=name)


@rule("NC030", "info")
def missing_tokenizer(subject: Subject) -> Iterator[Finding]:
    """The checkpoint has no tokenizer.

    What: none of the files that tokenizers are kept in is there (tokenizer.json, tokenizer.model, vocabularies).
    Why: engines do not start, or fetch the tokenizer of another revision by name.
    Fix: copy the tokenizer's files from the parent; where the parent has them, this is a warning.
    False alarm: a checkpoint that is always served with a tokenizer given apart.
    """
    if not subject.found.folder:
        return
    parent = _parent(subject)
    has = any(_TOKENIZERS.match(file.name) for file in subject.found.files)
    parent_has = parent is not None and any(_TOKENIZERS.match(file.name) for file in parent.side_files)
    yield from _lost(subject, TOKENIZER, "the tokenizer", "an engine must be given one", has, parent_has)


@rule("NC031", "info")
def missing_template(subject: Subject) -> Iterator[Finding]:
    """The checkpoint has no chat template.

    What: neither chat_template.jinja nor a chat_template in tokenizer_config.json.
    Why: chat requests are refused, or rendered with another template: an instruct model then talks nonsense that
    looks like damage by quantization.
    Fix: copy the template from the parent; where the parent has one, this is a warning.
    False alarm: base models have none.
    """
    if not subject.found.folder or (
        TOKENIZER_CONFIG not in _beside(subject.checkpoint) and _parent(subject) is None
    ):
        return
    parent = _parent(subject)
    has = _template(subject.checkpoint) is not None
    parent_has = parent is not None and _template(parent) is not None
    yield from _lost(subject, _TEMPLATES[0], "the chat template", "chat requests need one", has, parent_has)


@rule("NC032", "info")
def missing_generation_config(subject: Subject) -> Iterator[Finding]:
    """The checkpoint has no generation_config.json.

    What: a model that generates text has no file with its sampling and stop tokens.
    Why: engines take stop tokens from config.json alone, and many instruct models stop at another token: answers
    run on until the limit.
    Fix: copy it from the parent; where the parent has one, this is a warning.
    False alarm: models that are published without it.
    """
    if not subject.found.folder or not _generates(subject):
        return
    parent = _parent(subject)
    has = Path(GENERATION) in subject.found.files
    parent_has = parent is not None and GENERATION in _beside(parent)
    why = "stop tokens come from config.json alone"
    yield from _lost(subject, GENERATION, "the generation config", why, has, parent_has)


@rule("NC033", "warning", parent=True)
def changed_side_file(subject: Subject) -> Iterator[Finding]:
    """A side file says something else than the parent's.

    What: what makes tokens of text differs (vocabulary, merges, normalizer, added tokens, ...), the chat template, or
    the stop tokens of the generation config. Other differences of these files are told as information.
    Why: other token ids or another prompt make another model of the same weights, and benchmarks fall as if by
    quantization.
    Fix: copy the parent's file, unless the change was meant.
    False alarm: a tokenizer or template that was corrected after the parent's release.
    """
    parent = _parent(subject)
    if parent is None or not subject.found.folder:
        return
    one, other = _template(subject.checkpoint), _template(parent)
    if one is not None and other is not None and one != other:
        yield Finding("the chat template differs from the parent's", tensor=_TEMPLATES[0],
                      got=_sum(str(one).encode()), wanted=_sum(str(other).encode()), remedy=_copy(parent))  # fmt: skip
    both = _beside(subject.checkpoint) & _beside(parent)
    for name in sorted(name for name in both if name.endswith((".json", ".model", ".txt", ".tiktoken"))):
        a, b = ((root / name).read_bytes() for root in (subject.root, parent.root))
        if a != b:
            yield from _difference(name, a, b, parent)


def _difference(name: str, ours: bytes, theirs: bytes, parent: Checkpoint) -> Iterator[Finding]:
    """What a file that is there twice with other bytes is worth."""
    if not _TOKENIZERS.match(name) and name not in (GENERATION, TOKENIZER_CONFIG) and not _NEEDED.match(name):
        return
    keys = _other_keys(name, ours, theirs) if name.endswith(".json") else ["its bytes"]
    keys = [key for key in keys if key != "chat_template"]
    if not keys:
        return
    a, b = parsed(ours)[0], parsed(theirs)[0]
    grave, alike = bool(_TOKENIZERS.match(name)) or bool(set(keys) & set(_STOPS)), ""
    if name == TOKENIZER and isinstance(a, dict) and isinstance(b, dict):
        changing = token_keys(a, b)
        grave, alike = bool(changing), "" if changing else ", and makes the same tokens"
        keys = changing or keys
    elif name == TOKENIZER_CONFIG and isinstance(a, dict) and isinstance(b, dict):
        grave = any(key in a and key in b and a[key] != b[key] for key in _SWITCHES)
    yield Finding(
        f"differs from the parent's in {some(keys, 4)}{alike}", tensor=name, got=_sum(ours), wanted=_sum(theirs),
        severity=None if grave else "info", remedy=_copy(parent), facts={"keys": keys},
    )  # fmt: skip


def _other_keys(name: str, ours: bytes, theirs: bytes) -> list[str]:
    """The keys at the top of two JSON files that have other values, without what writers say of themselves."""
    a, b = parsed(ours)[0], parsed(theirs)[0]
    if not isinstance(a, dict) or not isinstance(b, dict):
        return [] if a == b else ["its content"]
    absent = object()
    names = [key for key in {**a, **b} if a.get(key, absent) != b.get(key, absent) and key not in _WRITERS]
    return sorted(names)


def _copy(parent: Checkpoint) -> str:
    return f"copy it from {parent.root}, unless the change was meant"


def _sum(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"


@rule("NC034", "info", parent=True)
def lost_side_file(subject: Subject) -> Iterator[Finding]:
    """A side file of the parent is not there.

    What: a file beside the parent's weights (a processor's config, special tokens, code, a licence) was not copied.
    Why: of a processor or vocabulary an engine needs it to start, and that is a warning; a licence often must travel
    along.
    Fix: copy the file from the parent.
    False alarm: documents and images that nobody needs.
    """
    parent = _parent(subject)
    if parent is None or not subject.found.folder:
        return
    have = {str(file) for file in subject.found.files}
    told = {GENERATION, *_TEMPLATES}
    lost = [str(file) for file in parent.side_files if str(file) not in have]
    lost = [
        name for name in lost if name not in told and not _TOKENIZERS.match(name) and not name.startswith(".")
    ]
    if not _template(subject.checkpoint) and TOKENIZER_CONFIG in lost:
        lost.remove(TOKENIZER_CONFIG)  # the rule about templates says it
    for name in lost:
        needed = bool(_NEEDED.match(name)) or (name.endswith(".py") and _names_code(subject.config, name))
        yield Finding("the parent has this file and the checkpoint has not", tensor=name,
                      severity="warning" if needed else None, remedy=f"copy it from {parent.root}")  # fmt: skip


def _names_code(config: dict[str, Any], file: str) -> bool:
    return any(reference.split(".")[0] == file.removesuffix(".py") for reference in _references(config))


def _references(config: dict[str, Any]) -> list[str]:
    """What auto_map names, without what lies in another repository."""
    table = config.get("auto_map")
    values = table.values() if isinstance(table, dict) else ()
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str) and "--" not in text and "." in text]


@rule("NC035", "warning")
def missing_code(subject: Subject) -> Iterator[Finding]:
    """The config names code that is not there.

    What: auto_map in config.json or tokenizer_config.json names a class in a Python file that the directory lacks.
    Why: with trust_remote_code the model or tokenizer cannot be built.
    Fix: copy the parent's *.py files, or remove auto_map where the engine knows the model by itself.
    False alarm: models that transformers and the engine have built in by now; auto_map is then not read.
    """
    if not subject.found.folder:
        return
    for source in (CONFIG, TOKENIZER_CONFIG):
        config = subject.config if source == CONFIG else _object(subject.root, source)
        files = dict.fromkeys(f"{reference.split('.')[0]}.py" for reference in _references(config))
        for name in files:
            if Path(name) not in subject.found.files:
                yield Finding(f"auto_map of {source} names this file, and it is missing", tensor=name,
                              remedy="copy the parent's *.py files")  # fmt: skip
