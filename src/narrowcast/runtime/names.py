"""The tensors of a checkpoint under the names of transformers' modules, and what is left over on either side.

Files keep the names that a family had when it was published (Mixtral's ``block_sparse_moe.experts.0.w1``, GPT-NeoX's
``embed_out``, ``language_model.model`` inside a multimodal model); modules have today's. transformers carries a table
of renamings for its own loader, and this is that table applied, so that nothing is renamed here in a way of its own.
What its loader computes beside renaming is another matter: experts are stacked there and stay apart here, and any
other conversion is refused by name, because a tensor taken as it lies would give wrong numbers under a right name.

    take(name) -> name of the module or parameter;   missing: no tensor has it;   unused: no parameter takes it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.runtime.experts import is_experts, projections
from narrowcast.runtime.skeleton import is_linear, stored
from narrowcast.store.folder import some

# Mixtral's names of an expert's projections.
_LEAVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(\.experts\.\d+\.)(w[123])(?=\.|$)")
# Conversions that only gather what is kept apart here.
_GATHERING = {"MergeModulelist", "Concatenate"}


def wanted(model: nn.Module, prefix: str = "") -> list[str]:
    """Every tensor that a skeleton needs, by the name under which ``Weights`` looks for it: weights of linears without
    ``.weight``, experts one by one."""
    names = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if is_linear(child):
            names.append(path)
            if getattr(child, "bias", None) is not None:
                names.append(f"{path}.bias")
        elif is_experts(child):
            names += [one for one, _ in projections(child, path)]
            if child.has_bias:
                names += [f"{one}.bias" for one, _ in projections(child, path)]
        else:
            _refuse_stacks(child, path)
            names += wanted(child, f"{path}.")
    return names + [f"{prefix}{name}" for name, _ in stored(model)]


def _refuse_stacks(module: nn.Module, path: str) -> None:
    """Refuse stacked experts with a forward of their family's own."""
    stacks = [
        name for name, one in module.named_parameters(recurse=False) if one.ndim == 3 and "proj" in name
    ]
    if stacks:
        raise UsageError(
            f"the experts of this family cannot be run: {path}.{stacks[0]}", got=type(module).__name__,
            wanted="stacked experts with the forward that transformers gives most families",
        )  # fmt: skip


class Names:
    """How the names of one checkpoint become those of one model."""

    def __init__(self, model: Any, where: object = "model") -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        table = get_model_conversion_mapping(model)
        self.where = where
        self.wanted = frozenset(_bare(name) for name in wanted(model))
        # Heads that read an embedding, as the model's own config has it: either may be the one that is stored.
        pairs = [(_bare(a), _bare(b)) for a, b in model.all_tied_weights_keys.items()]
        self.tied = [*pairs, *((b, a) for a, b in pairs)]
        self._base = str(getattr(model, "base_model_prefix", "model"))
        self._renamings = [one for one in table if not isinstance(one, WeightConverter)]
        self._computed = [
            one
            for one in table
            if isinstance(one, WeightConverter)
            and any(type(step).__name__ not in _GATHERING for step in one.operations)
        ]

    def take(self, name: str) -> str:
        """The model's name of a tensor, without ``.weight``; some other name for what the model does not have.

        Raises UsageError for a tensor that transformers computes with when it loads it.
        """
        if _bare(name) in self.wanted:
            return _bare(name)
        whole = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        for shown in (whole, name):
            found = self._renamed(shown)
            if found in self.wanted:
                return found
        for one in self._computed:
            if one.rename_source_key(whole)[1] is not None:
                steps = ", ".join(type(step).__name__ for step in one.operations)
                raise UsageError(
                    f"transformers computes with {name} when it loads it, which is not done here",
                    where=self.where, got=steps, remedy="save the model with transformers and run that",
                )  # fmt: skip
        return found

    def _renamed(self, name: str) -> str:
        for one in self._renamings:
            name = one.rename_source_key(name)[0]
        name = _bare(_EXPERT.sub(lambda match: match[1] + _LEAVES[match[2]], name)).removeprefix("thinker.")
        name = name.removeprefix("language_model.") if ".lm_head" in name else name
        name = re.sub(r"^(model\.)?language_model\.(model\.)?", f"{self._base}.", name)
        if name not in self.wanted:
            inside, outside = f"{self._base}.{name}", name.removeprefix(f"{self._base}.")
            name = inside if inside in self.wanted else outside if outside in self.wanted else name
        return name

    def refuse_missing(self, found: Iterable[str]) -> None:
        """CheckpointError where a parameter has no tensor."""
        missing = sorted(self.wanted - set(found))
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the model's tensors are not in this checkpoint", where=self.where,
                got=some(missing, 3), wanted=f"all {len(self.wanted)} of them",
                remedy="`narrowcast audit` looks for the cause",
            )  # fmt: skip

    def unused(self, found: Sequence[str]) -> tuple[str, ...]:
        """What no parameter of the model takes, of the checkpoint's names."""
        return tuple(name for name in found if self.take(name) not in self.wanted)


def _bare(name: str) -> str:
    return name.removesuffix(".weight")
