"""Config groups of compressed-tensors, as every version of the library wrote them, and which modules they take.

A group is a mapping of arguments, or a list of targets under the name of a preset (``{"FP8": ["Linear"]}``).
Arguments that are missing have the library's defaults; a strategy that is missing follows from the group size. A
module is taken by name first, an exact one or ``re:`` with an expression that matches from its start, then by class;
an entry of ``ignore`` goes before every group. Engines fuse projections, so a fused name counts for its parts.

Source: compressed-tensors 0.20 (quantization/quant_scheme.py, utils/match.py), vLLM 0.32 (compressed_tensors/utils.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrowcast.containers.compressed_tensors.config import arguments
from narrowcast.containers.contents import Source, contradiction
from narrowcast.numbers.formats import FP32, formats
from narrowcast.tensors.presets import presets
from narrowcast.tensors.storage import stored_scheme

# The library's preset names that are ours, by another name or by the same.
_PRESETS = {
    "FP8": "fp8", "FP8_DYNAMIC": "fp8_dynamic", "FP8_BLOCK": "fp8_block", "W8A8": "int8", "INT8": "int8",
    "W4A16_ASYM": "w4a16_asym", "W4AFP8": "w4afp8", "NVFP4": "nvfp4", "NVFP4A16": "nvfp4a16", "MXFP4": "mxfp4",
    "MXFP4A16": "mxfp4a16", "MXFP4XFP8": "mxfp4xfp8", "MXFP6A16": "mxfp6a16", "MXFP6A8": "mxfp6a8", "MXFP8": "mxfp8",
    "MXFP8A16": "mxfp8a16",
}  # fmt: skip
_INTEGERS = re.compile(r"W([2-8])A(16|8|4)")
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "w1": "w13", "w3": "w13",
}  # fmt: skip
_EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte")
_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\..*$")


@dataclass(frozen=True)
class Group:
    """One config group: arguments with their defaults, None where there are none."""

    targets: tuple[str, ...]
    weights: Mapping[str, Any] | None
    inputs: Mapping[str, Any] | None
    format: str | None


@dataclass(frozen=True)
class Groups:
    """All groups, and what none of them takes."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    @classmethod
    def of(cls, source: Source) -> Groups:
        """The groups of a config; CheckpointError for a preset that is none."""
        found = []
        for name, group in (source.config.get("config_groups") or {}).items():
            if isinstance(group, list):
                group = _preset(source, name, group)
            if isinstance(group, Mapping):
                targets = tuple(str(target) for target in group.get("targets") or ())
                weights, inputs = (_whole(group.get(key)) for key in ("weights", "input_activations"))
                found.append(Group(targets, weights, inputs, group.get("format")))
        return cls(tuple(found), tuple(str(name) for name in source.config.get("ignore") or ()))

    @cached_property
    def _targets(self) -> tuple[tuple[Group, Entries], ...]:
        return tuple((group, Entries.of(group.targets)) for group in self.groups)

    @cached_property
    def _ignore(self) -> Entries:
        return Entries.of(self.ignore)

    def taking(self, module: str) -> Group | None:
        """The group of a module, whether it is ignored or not."""
        for by in (Entries.by_name, Entries.by_fused_name, Entries.by_class):
            for group, targets in self._targets:
                if by(targets, module) is not None:
                    return group
        return None

    def ignoring(self, module: str) -> str | None:
        """The first entry by which a module is ignored."""
        found = [
            at for by in (Entries.by_name, Entries.by_class) if (at := by(self._ignore, module)) is not None
        ]
        return self.ignore[min(found)] if found else None

    def refuse_ignored(self, source: Source, quantized: Iterable[str]) -> None:
        """Refuse a module that is quantized and that the config ignores."""
        for module in quantized:
            entry = self.ignoring(module)
            if entry is not None:
                raise contradiction(
                    f"{module} is quantized, and the config ignores it", source, got=f"tensors of {module}",
                    wanted=f"no quantized layer that {entry!r} names",
                )  # fmt: skip

    def takes(self, module: str) -> bool:
        """Whether the config calls a linear layer of this name quantized."""
        group = self.taking(module)
        if group is None or group.weights is None:
            return False
        return self._ignore.by_name(module) is None and self._ignore.by_fused_name(module) is None


@dataclass(frozen=True)
class Entries:
    """A list of targets, looked up in one step for each module: where each exact name, each name below the layers and
    each class stands first, and the expressions with their places."""

    exact: Mapping[str, int]
    tails: Mapping[str, int]
    expressions: tuple[tuple[int, re.Pattern[str]], ...]

    @classmethod
    def of(cls, targets: Sequence[str]) -> Entries:
        exact: dict[str, int] = {}
        tails: dict[str, int] = {}
        expressions = []
        for at, target in enumerate(targets):
            if not target.startswith("re:"):
                exact.setdefault(target, at)
                tails.setdefault(_tail(target), at)
                continue
            with contextlib.suppress(re.error):  # one that is none matches nothing
                expressions.append((at, re.compile(target[3:])))
        return cls(exact, {tail: at for tail, at in tails.items() if tail}, tuple(expressions))

    def by_name(self, module: str) -> int | None:
        """The place of the first entry for a module's name. Files and models may call the part above the layers by
        other names."""
        named = self.exact.get(module), self.tails.get(_tail(module))
        fits = next((at for at, expression in self.expressions if expression.match(module)), None)
        return min((at for at in (*named, fits) if at is not None), default=None)

    def by_fused_name(self, module: str) -> int | None:
        """The same for the name of the fused module that it is part of."""
        path, _, leaf = module.rpartition(".")
        return self.by_name(f"{path}.{_FUSED[leaf]}") if leaf in _FUSED else None

    def by_class(self, module: str) -> int | None:
        """The place of the first entry for a module's class."""
        embedding = module.rsplit(".", 1)[-1] in _EMBEDDINGS
        classes = ("Embedding",) if embedding else ("Linear", "LinearBase")
        return min((self.exact[name] for name in classes if name in self.exact), default=None)


def _tail(name: str) -> str:
    """The name from its layers on; empty where it has none."""
    found = _LAYERS.search(name)
    return found[0].lstrip(".") if found else ""


def _preset(source: Source, name: str, targets: list[Any]) -> Mapping[str, Any]:
    """A group that is a list of targets under a preset's name."""
    key = name.upper()
    integers = _INTEGERS.fullmatch(key)
    if key == "UNQUANTIZED":
        return {"targets": targets}
    if key in _PRESETS:
        linear = presets[_PRESETS[key]].linear
        weight, inputs, dynamic = linear.weight, linear.input, linear.dynamic
    elif integers is not None:
        weight = stored_scheme(formats[f"int{integers[1]}"], (1, 128), FP32)
        inputs = None if integers[2] == "16" else stored_scheme(formats[f"int{integers[2]}"], (1, 0), FP32)
        dynamic = True
    else:
        raise contradiction(
            "a config group is no preset of compressed-tensors", source, got=name, wanted=", ".join(_PRESETS)
        )
    return {
        "targets": targets,
        "weights": arguments(weight, False, weight=True),
        "input_activations": arguments(inputs, dynamic, weight=False) if inputs is not None else None,
    }


def _whole(args: Any) -> dict[str, Any] | None:
    """Arguments with the library's defaults."""
    if not isinstance(args, Mapping):
        return None
    block, size = args.get("block_structure"), args.get("group_size")
    if isinstance(block, str):
        block = [int(part) for part in block.split("x")] if re.fullmatch(r"\d+x\d+", block) else block
    by_size = "group" if isinstance(size, int) and size > 0 else "channel" if size == -1 else "tensor"
    told = {key: value for key, value in args.items() if value is not None}
    strategy = str(told.get("strategy") or ("block" if block else by_size)).lower()
    return {
        "num_bits": 8, "symmetric": True, "dynamic": False, **told,
        "strategy": strategy, "type": str(told.get("type", "int")).lower(), "block_structure": block,
        "group_size": None if size == -1 else size,
    }  # fmt: skip
