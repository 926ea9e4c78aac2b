"""What one step reads, writes and multiplies on each GPU: ``decode`` and ``prefill``.

    decode, the context-th token of each of ``batch`` sequences, T = context tokens attended, the new one among them
        weights   Σ bytes(group) · touched / experts      every matrix once; embeddings are gathered, ``batch`` rows
        cache     read     batch · Σ layers · heads · attended(T) · bytes of K and V of one head and token
                  written  the same for one token, in layers that keep keys of their own
        states    read and written
        FLOP      batch · Σ 2 · N · K · active layers  +  batch · Σ 2 · heads · (dim of K + dim of V) · attended(T)

    prefill, T = context tokens of one prompt
        weights   as above; the cache is written; states are written once
        FLOP      T · Σ 2 · N · K, the head once for the last token
                  + Σ 2 · heads · (dim of K + dim of V) · Σ_t attended(t)       causal, masked products not counted

    attended(t)       t of full and latent, min(t, window) of sliding, (t - 1) mod window + 1 of chunked attention
                      of sparse attention no more than are chosen, but the indexer's keys of all, a byte an element
    latent, decode    2 · heads · (rank + rotary) + 2 · heads · rank for a token attended: the up-projection is absorbed
                      into queries and outputs, at the price of its own matrix product
    latent, prefill   2 · width of queries + 2 · width of values, or as in decode, whichever is less
    experts           at least those that one token takes; E (1 - (1 - k/E)^tokens) distinct ones are expected under
                      uniform routing, an assumption: trained routers are less even and touch fewer
    tensor parallel   a split matrix, its heads and its keys count by their share; fewer heads than GPUs are copied;
                      whole matrices and latents are read by every GPU; with ``ep`` the busiest has its share at least
    pipeline          a step passes all stages, one after the other: the sum over stages is what one stage would take

Everything here is the least that must be done. Left out: activations, softmax and other element-wise work, the FLOP of
recurrences (a few for each element of a state) and of indexers, communication, layers whose cache a mode keeps wide,
and that a cache on the chip could keep something from one step to the next, which models of some ten megabytes do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from narrowcast.hardware.cache_modes import CACHE_MODES, CacheModeRow
from narrowcast.hardware.cost import Work
from narrowcast.model.geometry import Attention, Geometry, Matrix
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import formats
from narrowcast.serving.question import Question
from narrowcast.serving.served import TOWERS, Group, Served


@dataclass(frozen=True)
class Traffic:
    """What one step asks of each GPU: bytes by what they are, and FLOP by arithmetic."""

    weights: float
    gathered: float
    cache_read: float
    cache_written: float
    states: float
    flops: Mapping[str, float]

    @property
    def moved(self) -> float:
        """All bytes."""
        return self.weights + self.gathered + self.cache_read + self.cache_written + self.states

    @property
    def work(self) -> Work:
        return Work(self.moved, self.flops)


def decode(
    served: Served, question: Question, arithmetics: Sequence[str], attention: Sequence[str],
    *, batch: int | None = None, uniform: bool = False,
) -> Traffic:  # fmt: skip
    """One token for each of ``batch`` sequences (None: the question's). ``arithmetics`` has the arithmetic of each of
    the model's groups, ``attention`` that of the products with keys and values, by kind of layer; ``uniform`` counts
    the experts that uniform routing is expected to touch instead of the fewest."""
    tokens = question.batch if batch is None else batch
    flops: dict[str, float] = {}
    for group, arithmetic in zip(served.groups, arithmetics, strict=True):
        if multiplied(group, served):
            _add(flops, arithmetic, tokens * _flops(group.matrix, question))
    for each, arithmetic in zip(served.geometry.attention, attention, strict=True):
        total = attended(each, question.context) * each.layers * _per_pair(each, served.geometry)
        _add(flops, arithmetic, tokens * total / _among(each, question))
    per_sequence = _cache(served, question, question.context)
    return Traffic(
        _weights(served, question, tokens if uniform else None), tokens * _row(served, question),
        tokens * per_sequence[0], tokens * per_sequence[1], tokens * 2 * states(served, question), flops,
    )  # fmt: skip


def prefill(
    served: Served,
    question: Question,
    arithmetics: Sequence[str],
    attention: Sequence[str],
    *,
    uniform: bool = False,
) -> Traffic:
    """One prompt of ``context`` tokens, up to its first answer; see ``decode``."""
    context = question.context
    flops: dict[str, float] = {}
    for group, arithmetic in zip(served.groups, arithmetics, strict=True):
        if multiplied(group, served):
            tokens = 1 if group is head(served) else context
            _add(flops, arithmetic, tokens * _flops(group.matrix, question))
    for each, arithmetic in zip(served.geometry.attention, attention, strict=True):
        total = pairs(each, context) * each.layers * _per_pair(each, served.geometry, prompt=True)
        _add(flops, arithmetic, total / _among(each, question))
    written = sum(
        each.keeping * each.tokens(context) * (_token(each, served, question) + each.index)
        for each in served.geometry.attention
    )
    return Traffic(
        _weights(served, question, context if uniform else None), context * _row(served, question),
        0.0, written, states(served, question), flops,
    )  # fmt: skip


def attended(attention: Attention, position: int) -> int:
    """Tokens that the ``position``-th token attends to, itself included."""
    if attention.kind == "state":
        return 0
    if attention.kind == "chunked" and attention.window is not None:
        return (position - 1) % attention.window + 1
    return min(attention.tokens(position), attention.chosen or position)


def pairs(attention: Attention, context: int) -> int:
    """Σ attended(t) over the tokens of a prompt."""
    window = attention.window or attention.chosen
    if attention.kind == "state":
        return 0
    if window is None or context <= window:
        return context * (context + 1) // 2
    if attention.kind == "chunked":
        whole, rest = divmod(context, window)
        return whole * window * (window + 1) // 2 + rest * (rest + 1) // 2
    return window * (window + 1) // 2 + (context - window) * window


def head(served: Served) -> Group | None:
    """The group whose matrix gives the logits: the head, or else the embedding that is one. Files of a tied model may
    hold the head once more."""
    found = {group.matrix.role: group for group in reversed(served.groups)}
    return found.get(Role.LM_HEAD) or (found.get(Role.EMBEDDING) if served.geometry.tied else None)


def streamed(served: Served) -> float:
    """Bytes of weights that a step of one sequence reads, of all GPUs together."""
    return served.vector_bytes + sum(
        _touched(group, None) for group in served.groups if multiplied(group, served)
    )


def multiplied(group: Group, served: Served) -> bool:
    """Whether a step multiplies with the group's matrix, and so reads it whole."""
    role = group.matrix.role
    return group is head(served) or (role is not Role.EMBEDDING and role not in TOWERS)


def expected(matrix: Matrix, tokens: int) -> float:
    """Distinct experts of a layer that ``tokens`` tokens touch under uniform routing."""
    return matrix.experts * (1 - (1 - matrix.active / matrix.experts) ** tokens)


def share(matrix: Matrix, question: Question) -> float:
    """The share of the matrix that one of the GPUs reads."""
    if matrix.experts > 1 and question.ep:
        return 1 / question.tp
    if matrix.split == "whole":
        return 1.0
    return 1 / min(question.tp, matrix.heads or question.tp)


def cache_mode(served: Served, question: Question) -> CacheModeRow:
    """The row of what the cache holds: as asked, or as the checkpoint asks."""
    return CACHE_MODES[(served.kv or "auto") if question.kv == "auto" else question.kv]


def _add(flops: dict[str, float], arithmetic: str, count: float) -> None:
    if count:
        flops[arithmetic] = flops.get(arithmetic, 0.0) + count


def _flops(matrix: Matrix, question: Question) -> float:
    """FLOP of one token on one GPU."""
    n, k = matrix.shape
    return 2 * n * k * matrix.layers * matrix.active * share(matrix, question)


def _weights(served: Served, question: Question, tokens: int | None) -> float:
    """Bytes of weights that one GPU reads: of experts the fewest, or those that ``tokens`` are expected to touch. Of
    vectors norms are on every GPU and parameters of recurrences are split: the least is that all are."""
    return served.vector_bytes / question.tp + sum(
        _touched(group, tokens) * share(group.matrix, question)
        for group in served.groups
        if multiplied(group, served)
    )


def _touched(group: Group, tokens: int | None) -> float:
    matrix = group.matrix
    return group.nbytes / matrix.experts * (matrix.active if tokens is None else expected(matrix, tokens))


def _row(served: Served, question: Question) -> float:
    """Bytes of one row of each table that is looked up, and not read anyway as the head."""
    return sum(
        group.nbytes / group.matrix.shape[0] * share(group.matrix, question)
        for group in served.groups
        if group.matrix.role is Role.EMBEDDING and group is not head(served)
    )


def _cache(served: Served, question: Question, position: int) -> tuple[float, float]:
    """Bytes of one sequence's cache that a GPU reads and writes for the ``position``-th token."""
    read = written = 0.0
    for each in served.geometry.attention:
        token = _token(each, served, question)
        read += each.layers * (attended(each, position) * token + position * each.index)
        written += each.keeping * (token + each.index)
    return read, written


def _token(attention: Attention, served: Served, question: Question) -> float:
    """Bytes that a layer keeps of one token on one GPU."""
    if attention.kind == "state":
        return 0.0
    mode = cache_mode(served, question)
    if attention.kind == "latent":
        return float(mode.latent_bytes(attention.k_dim))
    heads = attention.kv_heads / min(question.tp, attention.kv_heads)
    return heads * mode.head_bytes(attention.k_dim, attention.v_dim)


def states(served: Served, question: Question) -> float:
    """Bytes of one sequence's states on one GPU of a single stage. Where a config says nothing of the recurrence's
    dtype SGLang takes FP32 (srt/configs/mamba_utils.py)."""
    own = served.geometry.dtype
    kept = "fp32" if question.engine == "sglang" else own
    bits = sum(
        each.layers
        * (
            (each.state - each.recurrent) * formats[own].bits
            + each.recurrent * formats[each.recurrent_dtype or kept].bits
        )
        for each in served.geometry.attention
    )
    return bits / 8 / question.tp


def _among(attention: Attention, question: Question) -> int:
    """GPUs that share the query heads."""
    return min(question.tp, attention.q_heads or question.tp)


def _per_pair(attention: Attention, geometry: Geometry, *, prompt: bool = False) -> float:
    """FLOP of one token attending to another in one layer, all heads."""
    heads = attention.q_heads
    if attention.kind != "latent":
        return 2 * heads * (attention.k_dim + attention.v_dim)
    rank = next(_sizes(geometry, "kv_b_proj", 1), 0)
    absorbed = 2 * heads * (attention.k_dim + rank)
    queries = next(_sizes(geometry, "q_b_proj", 0), None) or next(_sizes(geometry, "q_proj", 0), None)
    values = next(_sizes(geometry, "o_proj", 1), None)
    if not prompt or queries is None or values is None:
        return absorbed
    return min(absorbed, 2 * queries + 2 * values)


def _sizes(geometry: Geometry, leaf: str, side: int) -> Iterator[int]:
    return (matrix.shape[side] for matrix in geometry.matrices if matrix.leaf == leaf)
