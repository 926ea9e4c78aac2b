"""What one rank holds of a matrix, and of the layer that an engine makes of it and its siblings.

column   N / tp rows          heads fewer than ranks are copied: one head on each
row      K / tp columns
whole    all of it, as of routed experts that are spread over ranks one by one

q_proj [4096, 4096], k_proj and v_proj [1024, 4096] on 8 ranks  →  one layer [512 + 128 + 128, 4096]
"""

from __future__ import annotations

from narrowcast.model.geometry import Matrix
from narrowcast.serving.served import Group, Served


def held(matrix: Matrix, tp: int, ep: bool = False) -> tuple[int, int]:
    """[N, K] of one rank's part, rounded down where nothing divides it."""
    n, k = matrix.shape
    if matrix.split == "whole" or (ep and matrix.experts > 1):
        return n, k
    parts = min(tp, matrix.heads or tp)
    return (n // parts, k) if matrix.split == "column" else (n, k // parts)


def siblings(group: Group, served: Served) -> tuple[Group, ...]:
    """The groups that engines load with this one as one layer, itself among them, in the model's order."""
    if not group.matrix.fused:
        return (group,)
    parent = group.matrix.name.rpartition(".")[0]
    found = tuple(
        each
        for each in served.groups
        if each.matrix.name.rpartition(".")[0] == parent and each.matrix.leaf in group.matrix.fused
    )
    return found if group in found else (group,)


def layer(group: Group, served: Served, engine: str, tp: int, ep: bool = False) -> tuple[int, int]:
    """[N, K] of the layer that the engine multiplies with on one rank; transformers loads siblings one by one."""
    n, k = held(group.matrix, tp, ep)
    if engine == "transformers":
        return n, k
    alike = [each for each in siblings(group, served) if each.linear == group.linear]
    return sum(held(each.matrix, tp, ep)[0] for each in alike), k
