"""Over how many GPUs a model can be spread and stay whole: tensor, expert and pipeline parallelism, layer by layer.

    whole(size, unit)   tp with  tp | size  and  unit | size / tp       18432, 128  →  1, 2, 4, 8, 16
    query heads         tp | heads
    key heads           tp | heads, or heads | tp: each is copied to tp / heads ranks
    experts             spread one by one (EP), and then no matrix of theirs is divided
    mixers              tp | heads, and tp | groups of Mamba 2 unless there is one, which is copied
    layers              any number of stages up to the layers; a remainder makes stages unequal

Blocks, groups and packed words are asked of each matrix by itself, since gate and up are divided one by one: of two
with 320 rows the 640 are five blocks of 128 and neither of them is a number of blocks. Parts of a matrix that a file
holds as one (qkv_proj) are too. Embedding and head are padded to whatever divides.

gpt-oss is an exception: vLLM and SGLang give each rank ⌈groups / tp⌉ groups of an expert and the last one the rest, so
that 2880 columns, 90 groups, load on 4 ranks as 23, 23, 23 and 21.

Source: vLLM 0.32 (config/model.py, layers/linear.py, distributed/utils.py, fused_moe/expert_map_manager.py,
mamba_mixer2.py, models/gpt_oss.py), SGLang 0.5.23 (models/llama.py, fused_moe_triton/layer.py, models/gpt_oss.py);
other engines as vLLM. Left out: data and context parallelism, which divide no matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from narrowcast.hardware.engines import paths
from narrowcast.hardware.gpus import GPU
from narrowcast.hardware.tensor_parallel import misplaces, partial_tiles, tp_problems, units
from narrowcast.model.geometry import Matrix
from narrowcast.model.roles import Role
from narrowcast.serving.question import Question
from narrowcast.serving.ranks import layer, siblings
from narrowcast.serving.served import Group, Served

SIZES = (1, 2, 4, 8, 16, 32)
_PADDED = frozenset({Role.EMBEDDING, Role.LM_HEAD})
_UNEVEN_GROUPS = frozenset({("vllm", "mxfp4"), ("sglang", "mxfp4")})
_UNEVEN_EXPERTS = frozenset({"vllm"})


@dataclass(frozen=True)
class Split:
    """One matrix, or one part of it. ``dimension`` is the side that is divided ("N = 18432"), ``unit`` what must stay
    together of it, ``whole`` the sizes that keep it whole, ``loads`` those that the engine loads as they are meant,
    ``problems`` why not the others, ``partial`` the block that one GPU has cut off already. ``notes`` are of copies,
    unequal shares and kernels that change."""

    name: str
    dimension: str
    unit: int
    what: str
    whole: tuple[int, ...]
    loads: tuple[int, ...]
    problems: Mapping[int, str] = field(default_factory=dict, hash=False)
    partial: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **vars(self), "whole": list(self.whole), "loads": list(self.loads), "notes": list(self.notes),
            "problems": {str(size): reason for size, reason in self.problems.items()},
        }  # fmt: skip


@dataclass(frozen=True)
class Splits:
    """All of them: ``tp`` are the sizes that every matrix loads on, ``whole`` those that cut nothing, ``ep`` the sizes
    for experts spread one by one (none: a dense model), ``pp`` the layers of each stage by number of stages.
    ``first`` says for each other size what stops it first."""

    rows: tuple[Split, ...]
    tp: tuple[int, ...]
    whole: tuple[int, ...]
    ep: tuple[int, ...]
    pp: dict[int, tuple[int, ...]]
    first: dict[int, str]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tp": list(self.tp), "tp_whole": list(self.whole), "ep": list(self.ep),
            "pp": {str(stages): list(layers) for stages, layers in self.pp.items()},
            "first": {str(size): reason for size, reason in self.first.items()},
            "rows": [row.to_json() for row in self.rows], "notes": list(self.notes),
        }  # fmt: skip


def whole(size: int, unit: int, sizes: tuple[int, ...] = SIZES) -> tuple[int, ...]:
    """The numbers of ranks that each get as many whole units."""
    return tuple(tp for tp in sizes if size % tp == 0 and size // tp % unit == 0)


def splits(
    served: Served, engine: str, gpu: GPU | None = None, *, ep: bool = False, sizes: tuple[int, ...] = SIZES
) -> Splits:
    """Which of ``sizes`` keep the model whole. With ``ep`` experts are spread one by one instead of being divided; with
    a ``gpu`` the notes tell where a rank's shape gets another kernel."""
    found = (row for group in served.groups for row in _rows(group, served, engine, gpu, sizes, ep))
    rows = tuple(found)
    loads = tuple(size for size in sizes if all(size in row.loads for row in rows))
    first = {size: _stops(rows, size) for size in sizes if size not in loads}
    cut = tuple(size for size in loads if all(size in row.whole for row in rows))
    experts = served.geometry.experts
    return Splits(
        rows, loads, cut, _ep(experts, engine, sizes), _pp(served.geometry.layers, engine, sizes), first,
        tuple(_notes(served, engine, experts, sizes)),
    )  # fmt: skip


def stopped(served: Served, question: Question) -> str | None:
    """What the asked tensor parallelism would cut first, or None; one GPU's shapes are the paths' own matter."""
    tp = question.tp
    return splits(served, question.engine, ep=question.ep, sizes=(tp,)).first.get(tp) if tp > 1 else None


def _stops(rows: tuple[Split, ...], size: int) -> str:
    row = next(row for row in rows if size in row.problems)
    return f"{row.name}: {row.problems[size]}"


def _rows(
    group: Group, served: Served, engine: str, gpu: GPU | None, sizes: tuple[int, ...], ep: bool
) -> Iterator[Split]:
    matrix = group.matrix
    if matrix.split == "whole" or (ep and matrix.experts > 1):
        yield from _undivided(group, served, engine, sizes)
        return
    if matrix.role in _PADDED:
        n = matrix.shape[0]
        yield Split(
            matrix.name, f"N = {n}", 1, "", sizes, sizes, notes=tuple(_padded(n, sizes))
        )  # fmt: skip
        return
    parts = matrix.pieces if len(matrix.pieces) > 1 and matrix.split == "column" else (matrix.shape[0],)
    for number, rows in enumerate(parts):
        one = replace(matrix, shape=(rows, matrix.shape[1]))
        if len(parts) > 1:
            heads = _heads_of(rows, number, matrix, served)
            one = replace(one, name=f"{matrix.name}[{number}]", heads=heads)
        yield _row(replace(group, matrix=one), group, served, engine, gpu, sizes, number == len(parts) - 1)


def _undivided(group: Group, served: Served, engine: str, sizes: tuple[int, ...]) -> Iterator[Split]:
    """A matrix that every rank holds whole, where it does not load even so."""
    if group.linear is None:
        return
    together = siblings(group, served)
    problem = tp_problems(
        engine, served.container, group.linear, group.matrix.shape, 1, "column", fused=len(together) > 1,
        last=together[-1] == group,
    )  # fmt: skip
    if problem is not None:
        partial = partial_tiles(group.linear, group.matrix.shape)
        rows, problems = f"N = {group.matrix.shape[0]}", dict.fromkeys(sizes, problem)
        yield Split(group.matrix.name, rows, *_unit(group, served), (), (), problems, partial)


def _unit(group: Group, served: Served) -> tuple[int, str]:
    """The largest thing that a share must be made of."""
    split = group.matrix.split
    if group.linear is None:
        return 1, ""
    return next(iter(units(served.container, group.linear, "column" if split == "whole" else split)), (1, ""))


def _heads_of(rows: int, number: int, matrix: Matrix, served: Served) -> int:
    """Heads of one part of a matrix: of q, k and v by the width of the first one's heads, of Mamba 2's B and C their
    groups, of other mixers the matrix's own."""
    if not matrix.heads:
        return 0
    if matrix.role is Role.SSM:
        return _groups(matrix, served) if _grouped(matrix, number) else matrix.heads
    width = matrix.pieces[0] // matrix.heads
    return rows // width if rows % width == 0 else 0


def _grouped(matrix: Matrix, number: int) -> bool:
    """Whether a part is B or C of a Mamba 2 mixer, whose parts are z, x, B, C and the time steps."""
    return matrix.role is Role.SSM and len(matrix.pieces) == 5 and number in (2, 3)


def _groups(matrix: Matrix, served: Served) -> int:
    """Groups of a Mamba 2 mixer: rows of B over the states of an element, which the state's size tells."""
    inner = matrix.pieces[0]
    states = next((each.recurrent // inner for each in served.geometry.attention if each.recurrent), 0)
    return matrix.pieces[2] // states if states else 0


def _row(
    group: Group,
    stored: Group,
    served: Served,
    engine: str,
    gpu: GPU | None,
    sizes: tuple[int, ...],
    ends: bool,
) -> Split:
    matrix = group.matrix
    side, length = ("N", matrix.shape[0]) if matrix.split == "column" else ("K", matrix.shape[1])
    found = {size: _problem(group, stored, served, engine, size, ends) for size in sizes}
    problems = {size: problem for size, problem in found.items() if problem is not None}
    loads = tuple(size for size in sizes if size not in problems)
    unit, what = _unit(group, served)
    partial = partial_tiles(group.linear, matrix.shape) if group.linear is not None else None
    kept = tuple(size for size in loads if whole(length, unit, (_parts(matrix, size),)))
    notes = [*_copies(matrix, loads), *_shares(group, served, engine, length, loads)]
    if (
        problems
        and group.linear is not None
        and misplaces(engine, served.container, group.linear, bool(matrix.fused))
    ):
        notes.append("the engine does not refuse a cut block: it applies scales to rows of the neighbour")
    notes += _changes(stored, served, engine, gpu, loads)
    return Split(
        matrix.name, f"{side} = {length}", unit, what, kept, loads, problems, partial, tuple(notes)
    )  # fmt: skip


def _parts(matrix: Matrix, tp: int) -> int:
    """Into how many parts ``tp`` ranks divide it: key heads that are fewer are copied."""
    return min(tp, matrix.heads) if _copied(matrix) else tp


def _copied(matrix: Matrix) -> bool:
    """Whether its heads are copied where ranks are more: keys and values, and the one group of a Mamba 2."""
    if matrix.split != "column" or not matrix.heads:
        return False
    return matrix.role is Role.ATTENTION or (matrix.role is Role.SSM and matrix.heads == 1)


def _problem(group: Group, stored: Group, served: Served, engine: str, tp: int, ends: bool) -> str | None:
    """Why a matrix cannot be divided by ``tp``, or None."""
    matrix, parts = group.matrix, _parts(group.matrix, tp)
    heads = _heads(group, served, tp)
    if heads is not None:
        return heads
    if matrix.split == "whole":
        return None
    if group.linear is None:
        side, length = ("N", matrix.shape[0]) if matrix.split == "column" else ("K", matrix.shape[1])
        return f"{side} = {length} is not a multiple of {parts}" if length % parts else None
    if _uneven(group, served, engine):
        return None
    together = siblings(stored, served)
    fused = len(together) > 1 or len(stored.matrix.pieces) > 1
    return tp_problems(
        engine, served.container, group.linear, matrix.shape, parts, matrix.split, fused=fused,
        last=ends and together[-1] == stored,
    )  # fmt: skip


def _heads(group: Group, served: Served, tp: int) -> str | None:
    """Heads that do not come out even: queries are divided, keys divided or copied."""
    matrix = group.matrix
    if not matrix.heads:
        return None
    queries = max((each.q_heads for each in served.geometry.attention), default=0)
    if _copied(matrix) and matrix.heads < queries:
        if matrix.heads % tp and tp % matrix.heads:
            return f"{matrix.heads} key heads are neither a multiple nor a divisor of {tp}"
        return None
    if _copied(matrix) and matrix.heads == 1:
        return None
    noun = "groups" if matrix.role is Role.SSM and matrix.name.endswith(("[2]", "[3]")) else "heads"
    return f"{matrix.heads} {noun} are not a multiple of {tp}" if matrix.heads % tp else None


def _uneven(group: Group, served: Served, engine: str) -> bool:
    """Whether the engine gives ranks unequal numbers of groups."""
    return (engine, served.container) in _UNEVEN_GROUPS and group.matrix.role is Role.EXPERT


def _padded(rows: int, sizes: tuple[int, ...]) -> Iterator[str]:
    to = -(-rows // 64) * 64
    for size in sizes:
        if to % size or to != rows:
            yield f"padded to a multiple of 64 rows and then of the ranks: {rows} becomes {to}"
            return


def _copies(matrix: Matrix, loads: tuple[int, ...]) -> Iterator[str]:
    copied = [size for size in loads if _copied(matrix) and size > matrix.heads]
    if copied:
        sizes = ", ".join(map(str, copied))
        yield f"{matrix.heads} heads: on {sizes} ranks each is on several of them, and so is its cache"


def _shares(group: Group, served: Served, engine: str, length: int, loads: tuple[int, ...]) -> Iterator[str]:
    """Ranks of gpt-oss whose numbers of groups differ."""
    if not _uneven(group, served, engine) or group.linear is None:
        return
    count = length // max(group.linear.weight.group, 1)
    for size in loads:
        each = -(-count // size)
        if count % size and group.matrix.split == "row":
            yield f"{count} groups on {size} ranks: {each} on each, {max(count - each * (size - 1), 0)} on the last"


def _changes(
    group: Group, served: Served, engine: str, gpu: GPU | None, loads: tuple[int, ...]
) -> Iterator[str]:
    """Sizes at which a rank's layer gets another kernel than the whole one."""
    if gpu is None or group.linear is None:
        return
    names = {}
    for size in loads:
        path = paths(
            engine, served.container, group.linear, gpu, shape=layer(group, served, engine, size),
            format=group.format, experts=group.matrix.role is Role.EXPERT,
        )  # fmt: skip
        names[size] = path.kernels[:1]
    first = names.get(1, ())
    for size, name in names.items():
        if name != first and first:
            shape = layer(group, served, engine, size)
            yield f"on {size} ranks {name[0] if name else 'no kernel'} instead of {first[0]}, for {shape[0]}x{shape[1]}"


def _ep(experts: int, engine: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that experts are spread over: evenly, or as they come in vLLM."""
    uneven = engine in _UNEVEN_EXPERTS
    return tuple(size for size in sizes if experts and (experts % size == 0 or (uneven and experts >= size)))


def _pp(layers: int, engine: str, sizes: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Layers of each stage. vLLM gives a remainder to the stages before the last, SGLang to the last ones."""
    found = {}
    for stages in sizes:
        if stages > layers:
            break
        each, rest = divmod(layers, stages)
        counts = [each] * stages
        for extra in range(rest):
            counts[-extra - (1 if engine == "sglang" else 2)] += 1
        found[stages] = tuple(counts)
    return found


def _notes(served: Served, engine: str, experts: int, sizes: tuple[int, ...]) -> Iterator[str]:
    uneven = [size for size in sizes if experts and experts % size and experts >= size]
    if uneven and engine in _UNEVEN_EXPERTS:
        yield f"{experts} experts are not a multiple of {', '.join(map(str, uneven))}: some ranks hold one more"
    latent = [each for each in served.geometry.attention if each.kind == "latent"]
    if latent:
        heads = latent[0].q_heads
        yield f"latent attention divides its {heads} heads; the latent cache is on every rank"
