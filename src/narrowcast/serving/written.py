"""What a preset would make of wide matrices, in bytes: by the rules and the spelling that ``narrowcast quantize`` has.

    bytes(matrix) = Σ over the tensors of its spelling      codes, scales, zero points, outer scale, stored shape

Which layers are taken, and the groups they get, are the recipe's own answers for one layer of each kind; layers of a
kind differ in nothing that a preset looks at. So the sizes are those of the files, tensor by tensor. Scales of a KV
cache, a few bytes per layer, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from narrowcast.containers import containers
from narrowcast.containers.spelling import Place, Spelling
from narrowcast.errors import UsageError
from narrowcast.model.geometry import Matrix
from narrowcast.model.modules import Module, modules, stack_orientation
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import resolve
from narrowcast.model.roles import Role
from narrowcast.serving.served import Group
from narrowcast.tensors.presets import Preset


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]


def representatives(matrices: Iterable[Matrix], config: Mapping[str, Any]) -> list[Module]:
    """One module for each matrix, as a checkpoint that has them would show it."""
    tensors: dict[str, _Tensor] = {}
    for matrix in matrices:
        name, (n, k) = matrix.name.replace("*", "0"), matrix.shape
        if stacked(matrix):
            turned = stack_orientation(name, config) == "in_out"
            tensors[name] = _Tensor(name, (matrix.experts, k, n) if turned else (matrix.experts, n, k))
        else:
            tensors[name + ".weight"] = _Tensor(name + ".weight", (n, k))
    return modules(tensors, config)


def stacked(matrix: Matrix) -> bool:
    """Whether the experts of a layer are one tensor."""
    return matrix.experts > 1 and ".experts.*." not in matrix.name


def nbytes(how: Spelling, shape: tuple[int, int]) -> int:
    """Bytes of one matrix [N, K] in this spelling, without parts that nobody has to write."""
    absent = {part.piece for part in how.parts if part.optional}
    specs = how.without(*absent).specs(Place("", shape[0]), shape[1])
    return sum(prod(spec.shape) * spec.dtype.bits // 8 for spec in specs)


class Writing:
    """A preset that is written in a container."""

    def __init__(self, preset: Preset, container: str, config: Mapping[str, Any]) -> None:
        self.preset, self.container, self.config = preset, containers[container], config
        self.notes: list[str] = []
        if self.container.spelling is None or self.container.name == "plain":
            raise UsageError(
                f"no preset is written as {self.container.name}", remedy="--container compressed-tensors"
            )

    def applied(self, groups: Sequence[Group], seen: Sequence[Module]) -> tuple[Group, ...]:
        """The groups with what the preset takes of them; ``seen`` has a module of each that might be."""
        recipe = Recipe.from_preset(self.preset.name)
        taken = {a.module.name: a.module for a in resolve(recipe, seen).quantized}
        found = [taken.get(group.matrix.name.replace("*", "0")) for group in groups]
        widths = [
            group.matrix.shape[1] for group, module in zip(groups, found, strict=True) if module is not None
        ]
        return tuple(
            group if module is None else self._quantized(group, module, self._together(group, groups, widths))
            for group, module in zip(groups, found, strict=True)
        )

    def _together(self, group: Group, groups: Sequence[Group], widths: Sequence[int]) -> list[int]:
        """The widths that have one group size with this matrix, as ``quantize`` takes them."""
        if self.container.one_group:
            return list(widths)
        if group.matrix.role is not Role.EXPERT:
            return [group.matrix.shape[1]]
        layer = group.matrix.name.partition(".experts")[0]
        experts = (other.matrix for other in groups if other.matrix.role is Role.EXPERT)
        return [matrix.shape[1] for matrix in experts if matrix.name.partition(".experts")[0] == layer]

    def _quantized(self, group: Group, module: Module, widths: list[int]) -> Group:
        assert self.container.spelling is not None
        matrix, fitting = group.matrix, self.preset.fitting(widths)
        linear = (fitting or self.preset).linear
        n, k = matrix.shape
        rows = [len(range(part.start, part.stop, part.step)) for part in module.parts] or [n]
        how = self.container.spelling(linear, group.dtype)
        height, width = how.multiples
        if fitting is None or k % width or any(size % height for size in rows):
            self.notes.append(
                f"{matrix.name} stays wide: {linear.weight.name} cannot divide its {n} x {k}, "
                "and quantize asks to keep it"
            )
            return group
        each = sum(nbytes(how, (size, k)) for size in rows) + matrix.bias * group.dtype.bits // 8
        return replace(group, linear=linear, nbytes=matrix.layers * matrix.experts * each, format=how.format)
