"""What the configs of a checkpoint say of its layers, as engines read it, beside what the layers are.

    layer      a matrix by its raw name, with whether it has quantized pieces        headers alone
    kept       an entry that keeps layers unquantized, and which it takes            ``ignore``, ``exclude``, ...
    promised   the layers that a config calls quantized                             all linears that no entry keeps

Containers refuse a config that contradicts its data; rules must still say which entry it is and what to do, so names
are read here without a container. An entry takes what any reader of its method would take: exact names, expressions
from the start of a name, parts of names, globs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from narrowcast.containers.compressed_tensors.groups import Groups
from narrowcast.containers.contents import Source, left_alone
from narrowcast.containers.detect import BESIDE
from narrowcast.containers.kinds import refuse_other_kinds
from narrowcast.containers.modelopt.config import excluded
from narrowcast.containers.quark.config import excluded as quark_excluded
from narrowcast.containers.skipped import skipped_by
from narrowcast.errors import NarrowcastError
from narrowcast.model.modules import modules
from narrowcast.model.roles import Role, classify, find_function
from narrowcast.store.folder import read_object

if TYPE_CHECKING:
    from narrowcast.audit.subject import Subject

# What only a quantized layer has, behind its module's name.
_QUANTIZED = re.compile(
    r"(\.weight_(scale(_inv|_2)?|packed|global_scale)|\.qweight|\.SCB|\.weight\.(\w*absmax|quant_state\.\w+)"
    r"|\._weight_(qdata|scale)|_(blocks|scale_inv)|(?<=_proj)_scales?)$"
)
_CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "U8", "I8"})
# Roles of layers that every engine builds as linears.
SURE = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
# Where entries that keep layers stand.
KEYS = (
    "ignore", "exclude", "exclude_modules", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules",
)  # fmt: skip
Kind = Literal["name", "regex", "glob", "class"]
CLASSES = ("Linear", "LinearBase", "Embedding")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_TAIL = re.compile(r"(?:^|\.)(layers\.\d+\..*)$")


@dataclass(frozen=True)
class Layer:
    """A matrix of the file: ``linear`` where engines build a linear layer of it for sure."""

    name: str
    role: str
    linear: bool
    quantized: bool
    shape: tuple[int, ...] | None = None


def layers(subject: Subject) -> dict[str, Layer]:
    """Every matrix by its raw module name, in file order; names of packed ones are told from their pieces."""
    entries, config = subject.checkpoint.entries, subject.config
    plain = {module.name: module for module in modules(entries, config)}
    quantized = {_QUANTIZED.sub("", name) for name in entries if _QUANTIZED.search(name)}
    quantized |= {
        name.removesuffix(".weight") for name, entry in entries.items()
        if entry.dtype.name in _CODES and name.endswith(".weight") and len(entry.shape) > 1
    }  # fmt: skip
    found = {}
    for name in dict.fromkeys([*plain, *sorted(quantized)]):
        module = plain.get(name)
        role = module.role if module is not None else classify(f"{name}.weight", (1, 1), config)
        row = find_function(name)
        linear = (module.linear and module.known) if module is not None else row is None or not row.direct
        shape = module.out_in if module is not None else None
        found[name] = Layer(name, str(role), linear and role in SURE, name in quantized, shape)
    return found


def beside(subject: Subject) -> dict[str, dict[str, Any]]:
    """The quantizers' files beside config.json that can be read."""
    names = {str(name) for name in subject.checkpoint.side_files}
    found = {}
    for name in BESIDE:
        if name in names:
            try:
                found[name] = read_object(subject.root / name)[1]
            except NarrowcastError:
                continue  # a rule about files says so
    return found


def source(subject: Subject) -> Source:
    """What a container would read, with nothing checked but the kinds of values: a config that no reader takes is
    refused elsewhere, and says nothing here."""
    said = dict(subject.quantization)
    try:
        refuse_other_kinds(said, subject.root)
    except NarrowcastError:
        said = {}
    return Source(subject.checkpoint, said, beside(subject))


def method(subject: Subject) -> str:
    """The quantization method that the configs name, as containers are called; empty where they name none."""
    block = subject.quantization
    said = str(block.get("quant_method") or "").lower().replace("_", "-")
    if not said and "config_groups" in block and "format" in block:
        return "compressed-tensors"
    if said.startswith("modelopt") or (not said and "hf_quant_config.json" in beside(subject)):
        return "modelopt"
    return said or next(
        (str(file["quant_method"]) for file in beside(subject).values() if file.get("quant_method")), ""
    )


@dataclass(frozen=True)
class Kept:
    """An entry that keeps layers unquantized: its text, the key and the file it stands under, and how it is read."""

    text: str
    key: str
    where: str
    method: str

    @property
    def kind(self) -> Kind:
        if self.text in CLASSES:
            return "class"
        if self.text.startswith("re:"):
            return "regex"
        if self.key in ("dynamic", "extra_config") and re.search(r"[*+?^$()\[\]{}|\\]", self.text):
            return "regex"
        return "glob" if re.search(r"[*?]", self.text) else "name"

    @property
    def expression(self) -> str:
        """A regex's text."""
        return self.text.removeprefix("re:").removeprefix("-:")

    def takes(self, module: str) -> bool:
        """Whether some reader of this method leaves the module alone for this entry."""
        if self.method == "modelopt":
            return excluded(module, (self.text,))
        if self.method == "fp8":
            return skipped_by(module, (self.text,)) is not None
        if self.method == "quark":
            return quark_excluded(module, (self.text,))
        if self.method == "awq":
            return self.text in module or left_alone(self.text, module)
        if self.method == "auto-round":
            own = self.text == module or module.endswith(f".{self.text}")
            return own or (self.kind == "regex" and _matches(re.search, self.text, module))
        if self.method == "gptq":
            return _matches(re.match, self.expression, module)
        if self.method == "compressed-tensors":
            if self.kind == "regex":
                return _matches(re.match, self.expression, module)
            return self.text == module or tail(self.text) == tail(module)
        return left_alone(self.text, module)


def _matches(how: Callable[[str, str], Any], expression: str, module: str) -> bool:
    try:
        return how(expression, module) is not None
    except re.error:
        return False


def tail(name: str) -> str:
    """A name from its layer on: files and models may call what is above the layers by other names."""
    found = _TAIL.search(name)
    return found[1] if found else name


def kept(subject: Subject) -> list[Kept]:
    """Every entry that keeps layers, each text once."""
    by = method(subject)
    found: dict[str, Kept] = {}
    blocks = {"config.json": subject.quantization} | beside(subject)
    for where, block in blocks.items():
        nested = block.get("quantization")
        inner = nested if isinstance(nested, Mapping) else block
        for key, texts in _lists(inner):
            for text in texts:
                found.setdefault(str(text), Kept(str(text), key, where, by))
    return list(found.values())


def taken(entries: list[Kept], names: list[str]) -> dict[Kept, list[str]]:
    """The layers that each entry takes. One expert of a layer stands for all, unless the entry speaks of experts."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_EXPERT.sub(".experts.0.", name, count=1), []).append(name)
    found = {}
    for entry in entries:
        if "expert" in entry.text:
            found[entry] = [name for name in names if entry.takes(name)]
        else:
            found[entry] = [
                name for one, all_of_it in alike.items() if entry.takes(one) for name in all_of_it
            ]
    return found


def _lists(block: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for key in KEYS:
        if isinstance(block.get(key), list):
            yield key, [text for text in block[key] if isinstance(text, str) and text]
    extra = block.get("extra_config")
    if isinstance(extra, Mapping):
        yield "extra_config", [
            key for key, said in extra.items()
            if isinstance(said, Mapping) and isinstance(said.get("bits"), int) and said["bits"] >= 16
        ]  # fmt: skip
    dynamic = block.get("dynamic")
    if isinstance(dynamic, Mapping):
        yield "dynamic", [key for key in dynamic if key.startswith("-:")]


def promised(subject: Subject) -> Callable[[str], bool] | None:
    """Whether the config calls a linear layer of a name quantized; None where it does not speak of every one."""
    block, by = subject.quantization, method(subject)
    if by == "compressed-tensors":
        try:
            return Groups.of(source(subject)).takes
        except NarrowcastError:
            return None
    mixed = str(block.get("quant_algo")).upper() == "MIXED_PRECISION"
    named = any(
        block.get(key) for key in ("layer_quant_config", "modules_in_block_to_quantize", "modules_to_convert")
    )
    if by not in ("fp8", "modelopt", "awq", "gptq", "quark", "fbgemm-fp8") or mixed or named:
        return None
    left = {name for names in subject.kept.values() for name in names}
    return lambda module: module not in left


def promises(subject: Subject) -> bool:
    """Whether the config says that some weight is quantized."""
    block, by = subject.quantization, method(subject)
    if by == "compressed-tensors":
        try:
            return any(group.weights is not None for group in Groups.of(source(subject)).groups)
        except NarrowcastError:
            return True
    if by == "modelopt":
        said = [block, *(file.get("quantization") or {} for file in beside(subject).values())]
        return any(
            part.get("quant_algo") not in (None, "NO_QUANT") for part in said if isinstance(part, Mapping)
        )
    return bool(by)
