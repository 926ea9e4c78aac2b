"""Rules about where a checkpoint runs: engine by engine, through which kernels, in which arithmetic, or why not.

    low precision = an instruction × a kernel that uses it × quantized inputs; where one is missing, the weights are
    decoded and the product is computed in 16 bits, or the engine refuses

Where nothing was asked, every engine is told as information. With ``--for`` a refusal is an error; with ``--gpu`` a
product in 16 bits that the checkpoint's inputs were quantized for is a warning. The facts are rows of
``narrowcast.hardware`` with a version; what no row says of an engine (transforms, orders of columns) is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from narrowcast.audit.config_dtypes import said_dtype
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.errors import NarrowcastError
from narrowcast.hardware.attention import AttentionPath, attention_path
from narrowcast.hardware.cache_modes import CACHE_MODES, follows
from narrowcast.hardware.engines import ENGINES
from narrowcast.jobs.coded import Coded
from narrowcast.model.families import geometry
from narrowcast.tensors.presets import LinearScheme

if TYPE_CHECKING:
    from narrowcast.hardware.engines import Path

TRANSFORMS = {  # where a transform may be computed at every step
    "vllm": ("input", "output"), "sglang": (), "tensorrt-llm": (),
    "transformers": ("input", "output", "k_cache", "q_attn"),
}  # fmt: skip


@dataclass(frozen=True)
class Where:
    """One row of the table: what an engine makes of the layers of one scheme, on the GPU that was asked for or on any.
    ``count`` is how many layers there are, ``module`` one that the path is about."""

    engine: str
    scheme: str
    inputs: str
    experts: bool
    count: int
    module: str
    path: Path
    low_on: str = ""  # the GPUs that compute in low precision, where the one that was asked for does not

    @property
    def title(self) -> str:
        return f"{ENGINES[self.engine]} {self.path.version}"

    @property
    def what(self) -> str:
        return f"{self.scheme} with {self.inputs} inputs" + (" in routed experts" if self.experts else "")

    def to_json(self) -> dict[str, Any]:
        """The row for machines."""
        path = self.path
        return {
            "engine": self.engine, "version": path.version, "scheme": self.scheme, "inputs": self.inputs,
            "experts": self.experts,
            "layers": self.count, "kernels": list(path.kernels), "arithmetic": path.arithmetic,
            "weight_only": path.weight_only, "refusal": path.refusal, "remedy": path.remedy, "notes": list(path.notes),
            "source": path.source,
        }  # fmt: skip


Alike = tuple[LinearScheme, str, bool]


def _groups(subject: Subject) -> dict[Alike, dict[str, Coded]]:
    """Quantized layers by what decides their kernels: computation, the container's word, routed expert or not."""
    found: dict[Alike, dict[str, Coded]] = {}
    for name, one in subject.quantized.items():
        assert one.coded is not None
        key = one.coded.stored.linear, one.coded.how.format, one.role == "expert"
        found.setdefault(key, {})[name] = one.coded
    return found


def table(subject: Subject) -> list[Where]:
    """What each engine makes of each scheme: the engine that was asked for, or all. Of several shapes, the one that
    is refused is told."""
    from narrowcast.hardware.engines import paths
    from narrowcast.hardware.kinds import input_kind

    rows, container = [], str(subject.container)
    for (linear, word, experts), layers in _groups(subject).items():
        shapes = {coded.shape: name for name, coded in reversed(layers.items())}
        for engine in [subject.engine] if subject.engine is not None else ENGINES:
            found = {
                shape: paths(
                    engine, container, linear, subject.gpu, shape=shape, format=word, experts=experts
                )
                for shape in shapes
            }
            shape = next(
                (shape for shape, path in found.items() if path.refusal is not None), next(iter(found))
            )
            inputs = input_kind(linear)
            path, module = found[shape], shapes[shape]
            low = ""
            if subject.gpu is not None and path.weight_only and linear.input is not None:
                best = paths(engine, container, linear, None, shape=shape, format=word, experts=experts)
                low = next((note for note in best.notes if note.startswith("computes in ")), "")
            low = low.partition(" on ")[2]
            rows.append(Where(engine, linear.weight.name, inputs, experts, len(layers), module, path, low))
    return rows


def _on(subject: Subject) -> str:
    return f" on {subject.gpu.name}" if subject.gpu is not None else ""


@rule("NC600", "error")
def engine_refuses(subject: Subject) -> Iterator[Finding]:
    """An engine cannot load layers of a scheme.

    What: The engine has no loader for the container, no kernel for the scheme, or none on the GPU.
    Why: It stops at start-up, or at the first forward pass.
    Fix: What the finding says: another GPU, container or preset.
    False alarm: Another version of the engine; the one that is meant is named. Where no engine was asked for (--for),
    it is information.
    """
    for row in subject.where:
        path = row.path
        if path.refusal is not None:
            yield Finding(
                shorten(f"{row.title}{_on(subject)} refuses {row.what}: {path.refusal}", 190), count=row.count,
                severity=None if subject.engine is not None else "info", got=f"{row.what}, such as {row.module}",
                wanted="a container, scheme and GPU that it loads", remedy=path.remedy, facts={"path": row.to_json()},
            )  # fmt: skip


@rule("NC601", "warning")
def computed_in_16_bits(subject: Subject) -> Iterator[Finding]:
    """Inputs are quantized by the checkpoint, and the engine computes in 16 bits on this GPU.

    What: The checkpoint has quantized inputs, and the kernel that the engine chooses decodes the weights and multiplies
    in bf16, because the GPU lacks the instruction or the engine the kernel; or it emulates.
    Why: The memory is saved and the speed is not; results differ from those of a GPU that quantizes the inputs.
    Fix: Another GPU, or a preset whose inputs stay wide, which is then what is computed everywhere.
    False alarm: A deployment that is bound by memory, where weight-only is as fast. Without --for and --gpu it is
    information.
    """
    if subject.gpu is None:
        return
    for row in subject.where:
        path = row.path
        emulated = path.refusal is None and "emulated" in path.arithmetic
        if path.refusal is None and (emulated or (path.weight_only and row.inputs != "wide")):
            yield Finding(
                f"{row.title}{_on(subject)} computes {row.what} as {path.arithmetic}", count=row.count,
                severity=None if subject.engine is not None else "info", got=f"{path.kernels[0]}: {path.arithmetic}",
                wanted="a product in low precision", remedy=_instead(row),
                facts={"path": row.to_json()},
            )  # fmt: skip


def _instead(row: Where) -> str:
    """Where the product is in low precision, and the preset that is what is computed here."""
    from narrowcast.tensors.presets import presets

    wide = [
        name for name, one in presets.items() if one.linear.weight.name == row.scheme and not one.linear.input
    ]
    preset = (
        f"the preset {wide[0]}, which is the same arithmetic here" if wide else "a preset with wide inputs"
    )
    return f"for memory alone, {preset}; for speed, {row.low_on or 'another preset'}"


@rule("NC602", "info")
def engine_loads(subject: Subject) -> Iterator[Finding]:
    """An engine loads layers of a scheme; this is how.

    What: The kernel that the engine chooses first, the precision of the product, and on which GPUs.
    Why: The same file is computed in low precision on one GPU and weight-only on another.
    Fix: Nothing to fix.
    False alarm: It is read from the engine's code at the version that is named, not measured.
    """
    for row in subject.where:
        path = row.path
        if path.refusal is None:
            kernel = path.kernels[0] if path.kernels else "its own code"
            yield Finding(
                f"{row.title}{_on(subject)} loads {row.what} through {kernel}: {path.arithmetic}", count=row.count,
                got="; ".join(path.notes) or None, facts={"path": row.to_json()},
            )  # fmt: skip


@rule("NC603", "warning")
def package_is_needed(subject: Subject) -> Iterator[Finding]:
    """An engine loads a scheme only with an optional package.

    What: Every kernel for the scheme comes from a package that the engine's default installation lacks.
    Why: Without the package the engine refuses at start-up.
    Fix: Install the package beside the engine, or choose another preset.
    False alarm: An image that has the package. Where no engine was asked for (--for), it is information.
    """
    for row in subject.where:
        path = row.path
        if path.refusal is None and path.package:
            yield Finding(
                f"{row.title}{_on(subject)} computes {row.what} only with {path.package} installed", count=row.count,
                severity=None if subject.engine is not None else "info", got=path.kernels[0],
                wanted=f"{path.package} beside the engine", remedy=f"install {path.package}, or choose another preset",
                facts={"path": row.to_json()},
            )  # fmt: skip


@rule("NC610", "error")
def transforms_at_every_step(subject: Subject) -> Iterator[Finding]:
    """The model computes rotations at every step that the engine does not.

    What: The config has compressed-tensors transforms of inputs, outputs or the KV cache, which are not in the weights.
    Why: An engine that ignores them computes another model: fluent nonsense. vLLM computes those of inputs and outputs,
    on one rank.
    Fix: Quantize without online transforms, or run it with an engine that has them.
    False alarm: Transforms that are in the weights already are left out. Without --for it is information.
    """
    contents = subject.contents
    if contents is None or not contents.online:
        return
    groups = (subject.quantization.get("transform_config") or {}).get("config_groups") or {}
    used = {
        str(apply.get("location")) for group in groups.values() if isinstance(group, Mapping)
        for apply in group.get("apply") or () if not str(apply.get("location")).startswith("weight_")
    }  # fmt: skip
    for engine in [subject.engine] if subject.engine is not None else ENGINES:
        lost = sorted(used - set(TRANSFORMS[engine]))
        ranks = engine == "vllm" and subject.tp > 1
        if lost or ranks:
            why = (
                f"does not compute transforms at {', '.join(lost)}"
                if lost
                else "has no transforms on several ranks"
            )
            yield Finding(
                f"{ENGINES[engine]} {why}", severity=None if subject.engine is not None else "info",
                got="; ".join(contents.online)[:120], wanted="an engine that computes them, or none",
                remedy="run it with vLLM on one rank, or quantize without online transforms",
                count=len(contents.online),
            )  # fmt: skip


@rule("NC611", "error")
def order_of_columns(subject: Subject) -> Iterator[Finding]:
    """Columns have an order of their own (act-order), which an engine or a split refuses.

    What: Layers have a g_idx that is no plain sequence of groups.
    Why: vLLM refuses GPTQ files with desc_act in groups; and with several ranks the groups of a rank's columns lie in
    other ranks' scales, so that engines hold all scales on each, or refuse.
    Fix: Quantize again without act-order, or ``narrowcast convert`` where the layout can be put straight.
    False alarm: Where no engine and one rank was asked for, it is information.
    """
    ordered = [
        name
        for name, one in subject.quantized.items()
        if one.coded and one.coded.how.part("order") is not None
    ]
    if not ordered:
        return
    groups = any(subject.quantized[name].coded.how.scheme.group for name in ordered)  # type: ignore[union-attr]
    refused = subject.container == "gptq" and groups and subject.engine in ("vllm", None)
    if refused:
        said = "vLLM 0.32.0 refuses GPTQ with desc_act in groups"
    elif subject.tp > 1:
        said = f"columns are in an order of their own, which {subject.tp} ranks cannot share out"
    else:
        return
    yield Finding(
        said, severity="error" if refused and subject.engine else "warning" if subject.tp > 1 else "info",
        tensor=ordered[0], got="g_idx that is no plain sequence", wanted="groups in the order of the columns",
        remedy="quantize again without act-order", count=len(ordered),
    )  # fmt: skip


@rule("NC612", "warning")
def cache_of_the_engine(subject: Subject) -> Iterator[Finding]:
    """The engine that was asked for does not have the KV cache that the config asks for.

    What: The engine has no such cache, takes it by a flag alone, or has no attention that reads it for these heads on
    this GPU.
    Why: It refuses, or the cache stays in 16 bits, and takes twice the memory that was planned.
    Fix: What the finding says: the flag, or a preset whose cache the engine has; most have FP8 with a scale per tensor.
    False alarm: A flag of the engine that sets another cache or another attention backend.
    """
    kv = subject.contents.kv if subject.contents is not None else None
    if kv is None or subject.engine is None:
        return
    engine, title, got = subject.engine, ENGINES[subject.engine], f"KV cache in {kv}"
    known = [row.name for row in CACHE_MODES.of(engine) if row.scales != "none"]
    remedy = "choose the cache by the engine's own flag, or a preset with another one"
    if kv not in CACHE_MODES or engine not in CACHE_MODES[kv].engines:
        said = f"{title} has no {kv} KV cache, so it stays wide or is refused"
    else:
        mode = CACHE_MODES[kv]
        path = _refused(subject, mode.name)
        if not follows(engine, mode.name, subject.container):
            said = f"{title} does not take the {kv} KV cache from this config, so it stays in 16 bits"
            remedy = remedy if path else f"pass --kv-cache-dtype {mode.engines[engine][-1]}"
        elif path is not None:
            said = f"{title} {path.version}{_on(subject)} has no attention over a KV cache in {kv}"
            got, remedy = str(path.refusal), path.remedy or remedy
        else:
            return
    yield Finding(
        said, tensor="config.json", got=got, wanted=", ".join(known) or "no quantized KV cache", remedy=remedy
    )


def _refused(subject: Subject, mode: str) -> AttentionPath | None:
    """What the engine refuses of attention over such a cache, on the GPU that was asked for. Of a model whose heads
    are not known, those of 128 elements are asked about, which every mode has if it has any."""
    if subject.gpu is None or subject.engine is None:
        return None
    try:
        heads = [(kept.kind, kept.k_dim) for kept in geometry(subject.config).attention]
    except NarrowcastError:
        heads = [("full", 128)]
    found = (attention_path(subject.engine, subject.gpu, mode, kind, dim) for kind, dim in heads)
    return next((path for path in found if path.refusal is not None), None)


@rule("NC613", "info")
def other_eight_bits(subject: Subject) -> Iterator[Finding]:
    """The GPU reads E4M3 bytes as E4M3FNUZ, half as large.

    What: The checkpoint has E4M3FN codes, and the matrix units of this GPU (MI300, MI325) read another eight bits.
    Why: Engines double the scales and clear the byte 0x80 while they load; code of your own must, too.
    Fix: Nothing, with an engine; its arithmetic reaches 240 instead of 448, at twice the scale.
    False alarm: None known.
    """
    if subject.gpu is None or "e4m3fnuz" not in subject.gpu.formats:
        return
    codes = [name for name, one in subject.quantized.items() if one.element.name == "e4m3fn"]
    if codes:
        yield Finding(
            f"{subject.gpu.name} reads E4M3 bytes as E4M3FNUZ: engines double the scales while they load",
            got=f"{len(codes)} layers of e4m3fn codes, such as {codes[0]}", count=len(codes),
        )  # fmt: skip


@rule("NC614", "warning")
def gpu_without_bf16(subject: Subject) -> Iterator[Finding]:
    """The model says bfloat16, and the GPU has none.

    What: config.json says bfloat16, and the GPU is older than compute capability 8.0.
    Why: vLLM refuses ("Bfloat16 is only supported on GPUs with compute capability of at least 8.0"); others convert to
    float16, whose range may not do.
    Fix: Run with --dtype half, after a look at the rules NC550 and NC551.
    False alarm: None known.
    """
    gpu = subject.gpu
    if (
        gpu is not None
        and gpu.vendor == "nvidia"
        and "bf16" not in gpu.formats
        and said_dtype(subject) == "bf16"
    ):
        yield Finding(
            f"config.json says bfloat16, and {gpu.name} has none", tensor="config.json", got="bfloat16",
            wanted="float16", severity="error" if subject.engine == "vllm" else None, remedy="run with --dtype half",
        )  # fmt: skip


@rule("NC615", "error")
def larger_than_memory(subject: Subject) -> Iterator[Finding]:
    """The weights alone are larger than the memory of the GPUs.

    What: The bytes of all tensors, shared out to the ranks, exceed the memory of the GPU that was asked for. The KV
    cache and activations come on top, so that a little less does not run either.
    Why: The engine stops with an out-of-memory error.
    Fix: More ranks (--tp), a larger GPU, or a narrower preset.
    False alarm: Offloading to the CPU.
    """
    gpu = subject.gpu
    if gpu is None or gpu.usable is None:
        return
    size = sum(entry.nbytes for entry in subject.checkpoint.entries.values()) / subject.tp
    if size > gpu.usable:
        has = f"{gpu.usable / 1e9:.1f} GB"
        yield Finding(
            f"{size / 1e9:.1f} GB of weights on each rank, and programs see {has} of {gpu.name}",
            got=f"{size / 1e9:.1f} GB", wanted=f"less than {has}",
            remedy="more ranks (--tp), a larger GPU, or a narrower preset",
        )  # fmt: skip
