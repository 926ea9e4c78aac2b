"""Small models written out layer by layer, and the bytes and FLOP of their steps counted one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from narrowcast.model.geometry import Attention, Geometry, Keeps, Matrix, Split
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import BF16
from narrowcast.serving.served import Group, Served

HIDDEN, VOCABULARY = 32, 64
Sized = tuple[str, int, int, Split, int]  # leaf, N, K, side that is split, heads that stay whole


@dataclass(frozen=True)
class Layer:
    """One layer written out: matrices, experts (number, active, matrices of one), and what it keeps."""

    matrices: tuple[Sized, ...]
    keeps: Keeps
    q_heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int | None = None
    state: int = 0
    borrows: bool = False
    rank: int = 0
    index: int = 0
    chosen: int | None = None
    experts: tuple[int, int, tuple[Sized, ...]] | None = None


def _attention(q: int, kv: int, dim: int) -> tuple[Sized, ...]:
    return (
        ("q_proj", q * dim, HIDDEN, "column", q), ("k_proj", kv * dim, HIDDEN, "column", kv),
        ("v_proj", kv * dim, HIDDEN, "column", kv), ("o_proj", HIDDEN, q * dim, "row", q),
    )  # fmt: skip


_MLP: tuple[Sized, ...] = (("up_proj", 48, HIDDEN, "column", 0), ("down_proj", HIDDEN, 48, "row", 0))
_LATENT: tuple[Sized, ...] = (
    ("q_a_proj", 16, HIDDEN, "whole", 0), ("q_b_proj", 4 * 12, 16, "column", 4), ("kv_a_proj", 28, HIDDEN, "whole", 0),
    ("kv_b_proj", 4 * 16, 24, "column", 4), ("o_proj", HIDDEN, 4 * 8, "row", 4),
)  # fmt: skip
_ROUTER: tuple[Sized, ...] = (("gate", 8, HIDDEN, "whole", 0),)
_DENSE = Layer(_attention(8, 2, 8) + _MLP, "full", 8, 2, 8, 8)
_SLIDING = replace(_DENSE, keeps="sliding", window=16)
_CHUNKED = replace(_DENSE, keeps="chunked", window=16)
_MOE = Layer(_attention(8, 2, 8) + _ROUTER, "full", 8, 2, 8, 8, experts=(8, 2, _MLP))
# Four heads, queries 8 + 4 rotary, values 8, a latent of 24 + 4.
_MLA = Layer(_LATENT + _MLP, "latent", 4, 1, 28, 0, rank=24)
_STATE = Layer((("in_proj", 64, HIDDEN, "column", 0), ("out_proj", HIDDEN, 64, "row", 0)), "state", state=96)
MODELS: dict[str, tuple[list[Layer], bool]] = {
    "dense": ([_DENSE] * 3, False),
    "tied": ([_DENSE] * 2, True),
    "sliding": ([_SLIDING, _DENSE] * 2, False),
    "chunked": ([_CHUNKED, _CHUNKED, _DENSE], False),
    "experts": ([_MOE] * 2, False),
    "latent": ([_MLA] * 2, False),
    "sparse": ([replace(_MLA, index=8, chosen=12)] * 2, False),
    "hybrid": ([_STATE, _STATE, _DENSE], True),
    "borrowing": ([_DENSE, replace(_DENSE, borrows=True)], False),
}


def served_as(name: str) -> Served:
    """The model by kinds of layers, as geometries have it."""
    layers, tied = MODELS[name]
    kinds: dict[Layer, int] = {}
    for layer in layers:
        kinds[replace(layer, borrows=False)] = kinds.get(replace(layer, borrows=False), 0) + 1
    matrices = [Matrix("embed", Role.EMBEDDING, (VOCABULARY, HIDDEN), split="column")]
    for layer, count in kinds.items():
        for leaf, n, k, split, heads in layer.matrices:
            role = Role.ROUTER if leaf == "gate" else Role.ATTENTION
            matrices.append(Matrix(f"layers.*.{leaf}", role, (n, k), count, split=split, heads=heads))
        if layer.experts:
            number, active, each = layer.experts
            matrices += [
                Matrix(f"layers.*.experts.{leaf}", Role.EXPERT, (n, k), count, number, active, split)
                for leaf, n, k, split, _ in each
            ]
    if not tied:
        matrices.append(Matrix("lm_head", Role.LM_HEAD, (VOCABULARY, HIDDEN), split="column"))
    attention = tuple(
        Attention(
            layer.keeps, count, layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, layer.window, layer.state,
            sum(not each.borrows for each in layers) if any(each.borrows for each in layers) else None,
            index=layer.index, chosen=layer.chosen,
        )
        for layer, count in kinds.items()
    )  # fmt: skip
    geometry = Geometry("toy", len(layers), HIDDEN, VOCABULARY, tied, tuple(matrices), attention, 40)
    groups = tuple(Group(matrix, None, 2 * matrix.parameters, BF16) for matrix in matrices)
    return Served(name, geometry, "plain", groups, 80, "config")


def _part(n: int, k: int, split: Split, heads: int, tp: int) -> Fraction:
    """Elements of a matrix that the first of the GPUs holds, counted row by row (or column by column)."""
    if split == "whole":
        return Fraction(n * k)
    side, other = (n, k) if split == "column" else (k, n)
    pieces = heads or side
    each = side // pieces
    owned = [piece for piece in range(pieces) if piece * tp // pieces == 0] if pieces >= tp else [0]
    return Fraction(len(owned) * each * other)


def _seen(layer: Layer, position: int) -> list[int]:
    """The tokens that the token at ``position`` (from 1) attends to."""
    before = range(1, position + 1)
    if layer.keeps == "state":
        return []
    if layer.keeps == "sliding":
        assert layer.window
        return [t for t in before if position - t < layer.window]
    if layer.keeps == "chunked":
        assert layer.window
        return [t for t in before if (t - 1) // layer.window == (position - 1) // layer.window]
    return list(before)[: layer.chosen]


def _heads(count: int, tp: int) -> int:
    return len([head for head in range(count) if head * tp // count == 0]) if count >= tp else 1


def _flops(layer: Layer, position: int, tp: int, prompt: bool) -> int:
    """Queries with keys, weights with values, head by head and token by token."""
    total = 0
    for _ in range(_heads(layer.q_heads, tp) if layer.q_heads else 0):
        for _ in _seen(layer, position):
            if layer.keeps == "latent":
                total += 2 * 12 + 2 * 8 if prompt else 2 * layer.k_dim + 2 * layer.rank
            else:
                total += 2 * layer.k_dim + 2 * layer.v_dim
    return total


def _kept(layer: Layer, tp: int) -> int:
    """Bytes of one token in 16 bits, and of an indexer's key in 8."""
    if layer.keeps == "latent":
        return 2 * layer.k_dim + layer.index
    return (
        sum(2 * (layer.k_dim + layer.v_dim) for _ in range(_heads(layer.kv_heads, tp)))
        if layer.kv_heads
        else 0
    )


def _every(layers: list[Layer], tied: bool) -> Iterator[tuple[Sized, int]]:
    """Every matrix that a token is multiplied with, and how often: experts as many as are active."""
    for layer in layers:
        for matrix in layer.matrices:
            yield matrix, 1
        if layer.experts:
            for matrix in layer.experts[2]:
                yield matrix, layer.experts[1]
    yield ("embed" if tied else "lm_head", VOCABULARY, HIDDEN, "column", 0), 1


def decoded(name: str, batch: int, context: int, tp: int) -> dict[str, Any]:
    layers, tied = MODELS[name]
    weights, flops, read, written, states = Fraction(80, tp), 0, 0, 0, Fraction(0)
    for (_, n, k, split, heads), times in _every(layers, tied):
        weights += 2 * times * _part(n, k, split, heads, tp)
        flops += int(2 * times * _part(n, k, split, heads, tp)) * batch
    for _ in range(batch):
        for layer in layers:
            token = _kept(layer, tp)
            read += (token - layer.index) * len(_seen(layer, context)) + layer.index * context
            written += 0 if layer.borrows else token
            flops += _flops(layer, context, tp, prompt=False)
            states += Fraction(2 * 2 * layer.state, tp)
    gathered = 0 if tied else 2 * batch * HIDDEN / tp
    return {"weights": weights, "gathered": gathered, "cache_read": read, "cache_written": written,
            "states": states, "flops": {"bf16": flops}}  # fmt: skip


def prompted(name: str, context: int, tp: int) -> dict[str, Any]:
    layers, tied = MODELS[name]
    once = decoded(name, 1, context, tp)
    flops, written = 0, 0
    for (leaf, n, k, split, heads), times in _every(layers, tied):
        tokens = 1 if leaf in ("embed", "lm_head") else context
        flops += int(2 * times * _part(n, k, split, heads, tp)) * tokens
    for layer in layers:
        kept = [t for t in range(1, context + 1) if not layer.window or context - t < layer.window]
        written += 0 if layer.borrows else len(kept) * _kept(layer, tp)
        for position in range(1, context + 1):
            flops += _flops(layer, position, tp, prompt=True)
    gathered = 0 if tied else 2 * context * HIDDEN / tp
    return {"weights": once["weights"], "gathered": gathered, "cache_read": 0, "cache_written": written,
            "states": once["states"] / 2, "flops": {"bf16": flops}}  # fmt: skip
