"""One stage of a pipeline on one of its GPUs: its weights by class, the room beside them, and what a cache takes of it.

The equations stand in ``serving/memory.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES, CacheModeRow
from narrowcast.model.geometry import Attention, Matrix
from narrowcast.model.roles import Role
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.serving.traffic import cache_mode, share, states

CHUNK = 8192  # tokens of a prompt that engines read at once, where nothing else is known
# The same of vLLM's server, by the GiB of memory from which it holds (vLLM 0.32, engine/arg_utils.py).
CHUNKS = ((160, 16384), (70, 8192), (0, 2048))
SAMPLED = 16  # bytes of a logit while vLLM samples: in FP32, sorted, and its index in 64 bits
VOCABULARY = 64  # vLLM and SGLang pad a vocabulary to a multiple
TILES = (256, 128)  # to which kernels for MXFP4 experts pad the hidden size, and an expert's own on each rank
LONGEST = 1 << 40  # tokens that nothing reaches
_CLASSES: Mapping[Role, str] = {
    Role.EMBEDDING: "embedding", Role.LM_HEAD: "output head", Role.ATTENTION: "attention", Role.MLP: "mlp",
    Role.EXPERT: "experts", Role.SHARED_EXPERT: "shared experts", Role.SSM: "recurrent", Role.ROUTER: "routers",
    Role.VISION: "towers", Role.AUDIO: "towers",
}  # fmt: skip
_WORKING = (Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT, Role.SSM)


@dataclass(frozen=True)
class Cache:
    """One mode of the cache on one GPU. ``token`` are bytes that a further token takes while windows fill, ``full``
    when they are full, ``sequence`` those of one sequence of the asked context with its states. ``tokens`` fit in all,
    in sequences of that context, ``sequences`` whole ones, and ``longest`` is the longest single one (None: no limit,
    or the memory is not known). ``spare``: bytes that the asked batch leaves, negative where it does not fit.
    ``scales`` as in ``CACHE_MODES``."""

    mode: str
    scales: str
    token: int
    full: int
    sequence: int
    tokens: int | None = None
    sequences: int | None = None
    longest: int | None = None
    spare: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the asked batch fits; None where the GPU's memory is not known."""
        return None if self.spare is None else self.spare >= 0


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` of the pipeline, with this part of the layers."""

    served: Served
    question: Question
    number: int
    part: float

    @property
    def left(self) -> float:
        """What is left with the asked batch, by which the fullest stage is found."""
        if self.room is None:
            return -float(sum(self.weights.values()))
        spare = self.cache.spare if self.cache is not None else None
        return self.room if spare is None else spare

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes by class."""
        found: dict[str, float] = {}
        for group in self.served.groups:
            if group.matrix.role is not Role.MTP:
                name = _CLASSES.get(group.matrix.role, "other")
                found[name] = found.get(name, 0) + self._bytes(group)
        towers = self.served.tower_bytes if self.number == 0 else 0
        found["towers"] = found.get("towers", 0) + towers
        found["vectors"] = self.served.vector_bytes * self.part
        return {name: ceil(size) for name, size in found.items() if size}

    def _bytes(self, group: Group) -> float:
        """Bytes of a group on one GPU of this stage: the embedding on the first, the head on the last one."""
        role, last = group.matrix.role, self.number == self.question.pp - 1
        size = group.nbytes * self._share(group.matrix)
        if role in (Role.EMBEDDING, Role.LM_HEAD):
            gives = last and (role is Role.LM_HEAD or self.served.geometry.tied)
            return (
                size
                * self._padded(group.matrix.shape[0])
                * (gives or (role is Role.EMBEDDING and self.number == 0))
            )
        if role in (Role.VISION, Role.AUDIO):
            return size * (self.number == 0)
        return size * self.part * self._tiled(group)

    def _padded(self, rows: int) -> float:
        """What an engine makes of a vocabulary's rows, as a factor."""
        return (
            ceil(rows / VOCABULARY) * VOCABULARY / rows if self.question.engine in ("vllm", "sglang") else 1.0
        )

    def _tiled(self, group: Group) -> float:
        """What kernels make of an MXFP4 expert whose sizes are no multiples of their tiles, as a factor. Marlin and
        FlashInfer do so; Triton's layout takes up to 2.5 % less (vLLM 0.32, fused_moe/oracle/mxfp4.py)."""
        matrix, question = group.matrix, self.question
        if (
            self.served.container != "mxfp4"
            or matrix.experts == 1
            or question.engine not in ("vllm", "sglang")
        ):
            return 1.0
        n, k = matrix.shape
        hidden, own = (k, matrix.pieces[0] if matrix.pieces else n) if matrix.split == "column" else (n, k)
        own = own if question.ep else ceil(own / question.tp)
        sizes = zip((hidden, own), TILES, strict=True)
        return prod(ceil(size / tile) * tile / size for size, tile in sizes)

    def _share(self, matrix: Matrix) -> float:
        """The share of a matrix on the fullest GPU: whole experts; of q, k and v in one tensor each by its heads."""
        tp = self.question.tp
        if matrix.experts > 1 and self.question.ep:
            return ceil(matrix.experts / tp) / matrix.experts
        if len(matrix.pieces) == 3 and matrix.heads:
            keys = max((one.kv_heads for one in self.served.geometry.attention), default=matrix.heads)
            q, k, v = matrix.pieces
            return (q / min(tp, matrix.heads) + (k + v) / min(tp, keys or tp)) / matrix.shape[0]
        return share(matrix, self.question)

    @cached_property
    def activations(self) -> int:
        """The estimate of what a chunk of a prompt takes beside weights and cache."""
        geometry, question = self.served.geometry, self.question
        made: dict[str, float] = {}
        for matrix in (group.matrix for group in self.served.groups if group.matrix.role in _WORKING):
            n, k = matrix.shape
            copies = matrix.active if matrix.experts > 1 else 1
            # Rows that this GPU makes for a token; of down and o what they read lies there as well.
            rows = (
                n + k / question.tp
                if matrix.split == "row"
                else n * share(matrix, replace(question, ep=False))
            )
            above, _, leaf = matrix.name.rpartition(".")
            key = f"{above}.{matrix.fused[0] if matrix.fused else leaf}"
            made[key] = made.get(key, 0) + copies * rows
        widest = max(made.values(), default=0)
        read = 2 * min(self.chunk, question.context) * (2 * geometry.hidden + widest)
        if question.engine == "vllm":
            return ceil(max(read, SAMPLED * question.batch * geometry.vocabulary))
        return ceil(read + 4 * question.batch * geometry.vocabulary / question.tp)

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that the engine reads at once."""
        gpu = self.question.gpu
        if self.question.engine != "vllm" or gpu.usable is None:
            return CHUNK
        if gpu.name.startswith("a100"):  # vLLM asks the device's name: an A100 gets what small cards get
            return CHUNKS[-1][1]
        return next(tokens for least, tokens in CHUNKS if gpu.usable >= least * 2**30)

    @cached_property
    def room(self) -> float | None:
        """Bytes for the cache; negative where the weights alone do not fit."""
        capacity = self.question.gpu.usable
        if capacity is None:
            return None
        budget = self.question.utilisation * capacity
        return budget - sum(self.weights.values()) - self.beyond

    @property
    def beyond(self) -> float:
        """What activations take of the budget: all in vLLM, and in others what the rest of the memory does not hold."""
        capacity = self.question.gpu.usable
        if self.question.engine == "vllm" or capacity is None:
            return float(self.activations)
        return max(0.0, self.activations - (1 - self.question.utilisation) * capacity)

    @cached_property
    def cache(self) -> Cache | None:
        """The asked mode; None where what the model keeps is not known."""
        return self.of(cache_mode(self.served, self.question)) if self.served.geometry.attention else None

    def modes(self) -> Iterator[Cache]:
        """Every mode that the engine has and that can store these keys."""
        attention = self.served.geometry.attention
        latent = any(one.kind == "latent" for one in attention)
        for mode in CACHE_MODES.of(self.question.engine, latent=latent) if attention else ():
            try:
                yield self.of(mode)
            except UsageError:
                continue

    def of(self, mode: CacheModeRow) -> Cache:
        """One mode: bytes, and what fits. UsageError where it cannot store the model's keys."""
        context, states, layers = self.question.context, self.states, list(self._layers(mode))

        def taken(tokens: int) -> float:
            return states + sum(one.tokens(tokens) * each for one, each in layers)

        token = sum(each for _, each in layers)
        full = sum(each for one, each in layers if one.window is None)
        found = Cache(mode.name, mode.scales, ceil(token), ceil(full), ceil(taken(context)))
        if self.room is None:
            return found
        free, sequence = max(self.room, 0.0), found.sequence
        longest = bisect_right(range(LONGEST), free, key=taken) - 1
        return replace(
            found, tokens=int(free * context / sequence) if token else None,
            sequences=int(free // sequence) if sequence else None,
            longest=max(longest, 0) if longest < LONGEST - 1 else None,
            spare=self.room - self.question.batch * sequence,
        )  # fmt: skip

    def _layers(self, mode: CacheModeRow) -> Iterator[tuple[Attention, float]]:
        """Kinds of layers, with the bytes that one token takes in all of them that keep keys of their own."""
        geometry, tp = self.served.geometry, self.question.tp
        wide = 2 * min(mode.wide_layers, geometry.layers // 2)
        if any(one.kind == "state" for one in geometry.attention):
            wide = 0
        for one in geometry.attention:
            if one.kind == "latent":
                yield one, one.keeping * (mode.latent_bytes(one.k_dim) + index_bytes(one.index)) * self.part
            elif one.kind != "state":
                heads, kept = ceil(one.kv_heads / tp), min(wide, one.keeping)
                wide -= kept
                narrow = (one.keeping - kept) * mode.head_bytes(one.k_dim, one.v_dim)
                plain = kept * CACHE_MODES["bf16"].head_bytes(one.k_dim, one.v_dim)
                yield one, heads * (narrow + plain) * self.part

    @cached_property
    def states(self) -> float:
        """Bytes of one sequence's states."""
        return states(self.served, self.question) * self.part


def index_bytes(dim: int) -> int:
    """What an indexer's key takes for one token: a byte an element and a float for 128 of them (vLLM, SGLang)."""
    return dim + 4 * (dim // 128)


def fullest(served: Served, question: Question) -> Stage:
    """The stage with the least left, layers dealt out as vLLM does: one more for the last stages but the very last."""
    pp, layers = question.pp, max(served.geometry.layers, 1)
    if pp > layers:
        raise UsageError(f"{layers} layers make no {pp} stages", wanted=f"pp of at most {layers}")
    counts = [layers // pp] * pp
    for i in range(layers % pp):
        counts[-(i + 2)] += 1
    stages = [Stage(served, question, i, count / layers) for i, count in enumerate(counts)]
    return min(stages, key=lambda stage: stage.left)
