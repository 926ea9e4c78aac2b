"""Which kernel each layer will run on, whether its arithmetic is really low, why, and what would change it.

Low-precision arithmetic takes three things at once; where one is missing, the weights are decoded and multiplied in 16
bits, or the engine refuses:

    instruction   the GPU multiplies such operands
    kernel        the engine has a kernel that uses it, for this shape
    inputs        the activations are quantized too, not the weights alone

    fp8_dynamic on an L4     yes, yes, yes   →  computes in fp8 (CutlassFP8)
    fp8_dynamic on an A100   no,  no,  yes   →  weight only: decoded and multiplied in bf16 (MarlinFP8)
    w4a16 anywhere           -,   no,  no    →  weight only, by design

Layers that an engine treats alike share a row: scheme, inputs, the container's word, expert or not, and what their
shape on one rank makes of it. The shape is that of the layer as the engine builds it, siblings fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from narrowcast.hardware.attention import AttentionPath, attention_path
from narrowcast.hardware.cost import peak_of
from narrowcast.hardware.engines import Path, engines, paths
from narrowcast.hardware.engines.row import DEQUANTIZED, EMULATED, UNKNOWN
from narrowcast.hardware.gpu import COLUMNS
from narrowcast.hardware.gpus import GPU
from narrowcast.hardware.kinds import WIDE, input_kind, weight_kind
from narrowcast.model.geometry import Attention
from narrowcast.model.roles import Role
from narrowcast.serving.question import Question
from narrowcast.serving.ranks import layer, siblings
from narrowcast.serving.served import Group, Served
from narrowcast.serving.traffic import cache_mode
from narrowcast.tensors.presets import LinearScheme, presets

_SINKS = frozenset({"gpt_oss"})  # families whose attention has sinks
_NAMES = {"fp8": "FP8", "int8": "INT8", "int4": "INT4", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp6": "MXFP6",
          "mxfp8": "MXFP8"}  # fmt: skip
_LARGE = 8192  # a side that every kernel takes
_STEPS = (2, 8, 16, 32, 64, 128, 256)  # multiples that kernels ask for


@dataclass(frozen=True)
class Conditions:
    """The three conditions; None: not known, or nothing to ask. ``operands`` are what would be multiplied."""

    operands: str
    instruction: bool | None
    kernel: bool | None
    inputs: bool


@dataclass(frozen=True)
class Kernels:
    """One answer: the groups that it is about, the engine's path, in a few words what that comes to, why, and what
    would change it. ``shape`` is [N, K] of the first group's layer on one rank; ``conditions`` None for layers that are
    not quantized."""

    groups: tuple[Group, ...]
    path: Path
    shape: tuple[int, int]
    verdict: str
    conditions: Conditions | None = None
    why: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The last parts of the layers' names: q_proj, k_proj."""
        return tuple(dict.fromkeys(group.matrix.leaf for group in self.groups))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        path = self.path
        return {
            "layers": [group.matrix.name for group in self.groups], "scheme": self.groups[0].scheme,
            "rank_shape": list(self.shape), "kernels": list(path.kernels), "arithmetic": path.arithmetic,
            "verdict": self.verdict, "conditions": vars(self.conditions) if self.conditions else None,
            "why": list(self.why), "change": list(self.change), "notes": list(self.notes), "refusal": path.refusal,
            "package": path.package, "source": path.source,
        }  # fmt: skip


@dataclass(frozen=True)
class Attends:
    """Layers of one kind of attention and what computes it."""

    attention: Attention
    path: AttentionPath


def kernels(served: Served, question: Question) -> tuple[Kernels, ...]:
    """What the engine makes of each set of layers that it treats alike, in the model's order."""
    found: dict[tuple[Any, ...], list[Group]] = {}
    for group in served.groups:
        path = _path(group, served, question)
        key = group.linear, group.format, group.matrix.role is Role.EXPERT, path, group.dtype.name
        found.setdefault(key, []).append(group)
    return tuple(_row(tuple(groups), key[3], served, question) for key, groups in found.items())


def attends(served: Served, question: Question) -> tuple[Attends, ...]:
    """What computes attention in each kind of layer, over the cache that was asked for or that the checkpoint asks
    for. UsageError for a mode that there is not."""
    mode = cache_mode(served, question).name
    sinks = served.geometry.family in _SINKS
    return tuple(
        Attends(each, attention_path(
            question.engine, question.gpu, mode, each.kind, each.k_dim, sinks=sinks, sparse=each.index > 0
        ))
        for each in served.geometry.attention
    )  # fmt: skip


def _path(group: Group, served: Served, question: Question) -> Path:
    if group.linear is None:
        engine = engines[question.engine]
        return Path(
            engine.name, engine.version, (), group.dtype.name, False, None, None, (), engine.source
        )  # fmt: skip
    return paths(
        question.engine, served.container, group.linear, question.gpu, shape=_shape(group, served, question),
        format=group.format, experts=group.matrix.role is Role.EXPERT,
    )  # fmt: skip


def _shape(group: Group, served: Served, question: Question) -> tuple[int, int]:
    return layer(group, served, question.engine, question.tp, question.ep)


def _row(groups: tuple[Group, ...], path: Path, served: Served, question: Question) -> Kernels:
    group = groups[0]
    shape, gpu = _shape(group, served, question), question.gpu
    if group.linear is None:
        roles = " and ".join(dict.fromkeys(each.matrix.role.value for each in groups))
        return Kernels(
            groups,
            path,
            shape,
            group.dtype.name,
            None,
            (f"not quantized: {roles}",),
            (),
            _wide_notes(gpu, group),
        )
    known = engines[question.engine].gpus.holds(gpu)
    conditions = _conditions(group.linear, path, gpu, known)
    instead = Instead(groups, served, question, path)
    return Kernels(
        groups, path, shape, _verdict(path, known, gpu), conditions,
        tuple(_why(group.linear, path, gpu, conditions, known)),
        tuple(dict.fromkeys(instead.said(conditions))) if known else (), tuple(_notes(path, gpu)),
    )  # fmt: skip


def _verdict(path: Path, known: bool, gpu: GPU) -> str:
    wide = "bf16" if "bf16" in gpu.formats or not gpu.formats else "fp16"
    if not known:
        return "unknown"
    if path.refusal is not None:
        return "refused"
    if path.low_precision:
        return f"computes in {path.arithmetic}" + (f", with {path.package} installed" if path.package else "")
    if path.arithmetic == EMULATED:
        return f"emulated: every product decodes the weights and multiplies in {wide}"
    if path.arithmetic == DEQUANTIZED:
        return f"dequantized: the weights are decoded once and kept in {wide}"
    if path.weight_only:
        return f"weight only: decoded and multiplied in {wide}"
    return UNKNOWN


def _operands(linear: LinearScheme) -> str:
    """What a product in low precision would multiply: the format of the inputs, or of the weights where inputs are
    wide."""
    kind = input_kind(linear)
    return (weight_kind(linear.weight) if kind == WIDE else kind).partition("_")[0].replace("uint", "int")


def _conditions(linear: LinearScheme, path: Path, gpu: GPU, known: bool) -> Conditions:
    operands = path.arithmetic if path.low_precision else _operands(linear)
    wanted = COLUMNS.get(operands, frozenset({operands}))
    instruction = bool(wanted & gpu.formats) if gpu.formats and operands in _NAMES else None
    kernel = (
        None if not known or (path.arithmetic == UNKNOWN and path.refusal is None) else path.low_precision
    )
    inputs = linear.input is not None or path.low_precision
    return Conditions(operands, instruction, kernel, inputs)


def _why(linear: LinearScheme, path: Path, gpu: GPU, found: Conditions, known: bool) -> Iterator[str]:
    """The conditions in words, the missing ones told apart."""
    title = f"{engines[path.engine].title} {path.version}"
    if not known:
        yield path.refusal or f"{title} has no rows for {gpu.name} here"
        return
    name = _NAMES.get(found.operands, found.operands)
    if found.instruction is not None:
        yield (
            f"instruction: {gpu.name} "
            + ("multiplies" if found.instruction else "does not multiply")
            + f" {name}"
        )
    if path.refusal is not None:
        yield f"kernel: {title} refuses: {path.refusal}"
    elif path.low_precision:
        yield f"kernel: {path.kernels[0]} multiplies in it"
    elif found.kernel is None:
        yield f"kernel: what {path.kernels[0]} computes in is its library's own matter"
    else:
        yield f"kernel: {path.kernels[0]} decodes the weights to 16 bits"
    yield f"inputs: {_inputs(linear, found)}"


def _inputs(linear: LinearScheme, found: Conditions) -> str:
    if linear.input is None:
        return (
            "the engine quantizes them, although the checkpoint keeps them wide"
            if found.inputs
            else "kept wide"
        )
    how = "quantized on the fly" if linear.dynamic else "quantized with the checkpoint's scale"
    return how if found.kernel is not False else f"{how} where a kernel takes them so, left wide by this one"


def _wide_notes(gpu: GPU, group: Group) -> tuple[str, ...]:
    return gpu.notes_about("bf16") if group.dtype.name == "bf16" and "bf16" not in gpu.formats else ()


def _notes(path: Path, gpu: GPU) -> Iterator[str]:
    """The path's own notes, and the traps of this GPU that matter to its arithmetic."""
    yield from path.notes
    if path.refusal is None and path.arithmetic != UNKNOWN:
        yield from (note for note in gpu.notes_about(peak_of(path.arithmetic)) if note not in path.notes)


@dataclass(frozen=True)
class Instead:
    """What would change the answer about layers that are treated alike."""

    groups: tuple[Group, ...]
    served: Served
    question: Question
    path: Path

    @property
    def _first(self) -> tuple[int, int]:
        return _shape(self.groups[0], self.served, self.question)

    @property
    def linear(self) -> LinearScheme:
        """What they compute."""
        linear = self.groups[0].linear
        assert linear is not None
        return linear

    def said(self, found: Conditions) -> Iterator[str]:
        """In words: the engine's remedy, the shape, a package, another preset here, another GPU."""
        if self.path.low_precision and not self.path.package:
            return
        if self.path.refusal is not None and self.path.remedy is not None:
            yield self.path.remedy
        yield from filter(None, map(self.blamed, self.groups))
        if self.path.package:
            yield f"without {self.path.package} installed, the engine refuses"
        if found.inputs and self.path.weight_only:
            yield from self._same()
        yield from self._presets()
        yield from self._gpus()

    def blamed(self, group: Group) -> str | None:
        """The side of a layer that keeps a better kernel away, found by asking for larger ones."""
        n, k = _shape(group, self.served, self.question)
        best = _key(self._ask(_LARGE, _LARGE))
        if best == _key(self.path):
            return None
        name = ", ".join(each.matrix.leaf for each in siblings(group, self.served))
        for side, size in (("N", n), ("K", k)):
            sizes = [(size, _LARGE) if side == "N" else (_LARGE, size)]
            sizes += [
                (up, _LARGE) if side == "N" else (_LARGE, up) for up in (-(-size // u) * u for u in _STEPS)
            ]
            fits = [_key(self._ask(*each)) == best for each in sizes]
            if not fits[0]:
                unit = next((unit for unit, fit in zip(_STEPS, fits[1:], strict=True) if fit), None)
                told = f"is not a multiple of {unit}" if unit is not None else "is too small"
                return f"{name}: {side} = {size} {told}, which {best[0]} asks for"
        return f"{name}: {best[0]} does not take {n}x{k}"

    def _ask(self, n: int, k: int) -> Path:
        return self._paths(self.linear, self.question.gpu, (n, k))

    def _paths(self, linear: LinearScheme, gpu: GPU | None, shape: tuple[int, int] | None = None) -> Path:
        group = self.groups[0]
        return paths(
            self.question.engine, self.served.container, linear, gpu, shape=shape,
            format=group.format if linear == self.linear else None, experts=group.matrix.role is Role.EXPERT,
        )  # fmt: skip

    def _same(self) -> Iterator[str]:
        """The preset whose arithmetic this is already."""
        for name, preset in presets.items():
            if preset.linear.weight == self.linear.weight and preset.linear.input is None:
                yield f"{name} is the same arithmetic here and leaves the inputs wide on every GPU"

    def _presets(self) -> Iterator[str]:
        """Presets that are computed in low precision on this GPU: of each arithmetic the nearest in bits of weights,
        without calibration first."""
        bits = self.linear.weight.element.bits
        real: dict[str, list[tuple[int, bool, int, str]]] = {}
        width = self.groups[0].matrix.shape[1]
        for order, (name, preset) in enumerate(presets.items()):
            fitting = preset.fitting((width,))
            if fitting is None or fitting.linear == self.linear:
                continue
            path = self._paths(fitting.linear, self.question.gpu, self._first)
            if path.low_precision and not path.package:
                off = abs(preset.linear.weight.element.bits - bits)
                real.setdefault(path.arithmetic, []).append((off, preset.calibrated, order, name))
        for arithmetic, found in sorted(real.items(), key=lambda item: min(item[1])):
            yield f"{min(found)[3]} is computed in {arithmetic} on {self.question.gpu.name}"

    def _gpus(self) -> Iterator[str]:
        """Where the same file is computed in low precision."""
        best = self._paths(self.linear, None, self._first)
        if not best.low_precision or best.package:
            return
        where = next((note for note in best.notes if note.startswith("computes in ")), None)
        runs = next((note for note in best.notes if note.startswith("runs on ")), "")
        yield f"the same file {where or f'computes in {best.arithmetic} on' + runs.removeprefix('runs on')}"


def _key(path: Path) -> tuple[str, ...]:
    """What a shape changes of a path: the first kernel, or that there is none."""
    return path.kernels[:1] or (f"refused: {path.refusal is not None}",)
