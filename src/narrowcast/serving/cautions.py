"""What not to do with this model on this GPU: one row for each mistake, said only where it can be made here.

A quantized checkpoint is held against what it is; for an unquantized one the mistakes are those of choosing a preset.
Each row is a small function from the case to what not to do, why, and what to do instead, with the source of the fact.
What a plan already refuses, such as a layer without a kernel or a model that does not fit, stands where it is refused.

Left out: what only the weights show (clipped scales, lost heads), which `narrowcast audit` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrowcast.hardware.engines import paths
from narrowcast.hardware.engines.row import EMULATED, Path
from narrowcast.hardware.gpus import FNUZ, INT8_SLOW
from narrowcast.hardware.kinds import input_kind, weight_kind
from narrowcast.hardware.overflow import fp16_families
from narrowcast.hardware.tensor_parallel import misplaces, tp_problems
from narrowcast.model.roles import Role
from narrowcast.serving.loading import CONTAINER
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.serving.splits import stopped
from narrowcast.serving.traffic import cache_mode, streamed
from narrowcast.tensors.presets import LinearScheme, presets

# Families in which single activations were seen to be larger than the rest by orders of magnitude.
MASSIVE = frozenset({"llama", "mistral", "mixtral", "gemma", "gemma3", "gemma3_text"})


@dataclass(frozen=True)
class Caution:
    """One thing not to do. ``name`` is stable, the rest is for reading."""

    name: str
    what: str
    why: str
    instead: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Words under stable keys."""
        return dict(vars(self))


@dataclass(frozen=True)
class Layer:
    """A quantized linear that is there or could be chosen, and what the engine makes of it here."""

    name: str
    linear: LinearScheme
    path: Path


@dataclass(frozen=True)
class Case:
    """A model, what is asked of it, and the batch below which a decode step waits for bytes alone (None: not known)."""

    served: Served
    question: Question
    crossover: float | None = None

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Quantized linears of the checkpoint, or those of all presets where it has none."""
        engine, gpu = self.question.engine, self.question.gpu
        if not self.served.quantized:  # a preset may still be chosen
            return tuple(
                Layer(name, one.linear, paths(engine, CONTAINER, one.linear, gpu))
                for name, one in presets.items()
            )
        found = {
            (group.linear, group.format, group.matrix.role is Role.EXPERT): group
            for group in self.served.groups if group.linear is not None
        }  # fmt: skip
        container = self.served.container
        return tuple(
            Layer(_scheme(linear), linear, paths(engine, container, linear, gpu, format=word, experts=expert))
            for linear, word, expert in found
        )

    def named(self, fits: Callable[[Layer], bool]) -> str:
        """Names of the layers that fit, each once; empty where none does."""
        return ", ".join(dict.fromkeys(layer.name for layer in self.layers if fits(layer)))


Said = tuple[str, str, str]
Look = Callable[[Case], Said | None]


@dataclass(frozen=True)
class Row:
    """One mistake: its name, how it is seen, and the source."""

    name: str
    look: Look
    source: str


def cautions(case: Case) -> tuple[Caution, ...]:
    """What not to do here, in the order of the rows."""
    return tuple(_found(case))


def _found(case: Case) -> Iterator[Caution]:
    for row in ROWS:
        said = row.look(case)
        if said is not None:
            yield Caution(row.name, *said, row.source)


def _scheme(linear: LinearScheme) -> str:
    inputs = "" if linear.input is None else f" with {linear.input.name} inputs"
    return f"{linear.weight.name}{inputs}"


def _emptied(layer: Layer, kinds: tuple[str, ...]) -> bool:
    """Whether inputs are quantized in the file and the engine keeps them wide."""
    return (
        layer.linear.input is not None
        and layer.path.weight_only
        and input_kind(layer.linear).startswith(kinds)
    )


def _fp8_for_speed(case: Case) -> Said | None:
    gpu = case.question.gpu
    names = case.named(lambda layer: _emptied(layer, ("fp8",)))
    if not names or gpu.multiplies("fp8"):
        return None
    return (
        f"FP8 for speed ({names})",
        f"{gpu.name} has no FP8 unit: codes are widened and multiplied in 16 bits; decoding reads fewer bytes, "
        "prefill and large batches gain nothing",
        "int8 for 8-bit arithmetic, w4a16 for fewer bytes",
    )


def _fp4_for_speed(case: Case) -> Said | None:
    gpu = case.question.gpu
    names = case.named(lambda layer: _emptied(layer, ("nvfp4", "mxfp4")))
    if not names:
        return None
    native = gpu.multiplies("fp4")
    lacks = "the engine has no kernel for it here" if native else f"{gpu.name} has no FP4 unit"
    return (
        f"FP4 for arithmetic ({names})",
        f"{lacks}: inputs stay wide and products are 16-bit",
        "nvfp4a16 or mxfp4a16: the same bytes and speed, nearer to the parent",
    )


def _static(case: Case) -> Said | None:
    family = case.served.geometry.family
    names = case.named(lambda layer: input_kind(layer.linear) in ("fp8_static", "int8_static"))
    if not names or family not in MASSIVE:
        return None
    return (
        f"one stored input scale per tensor ({names})",
        f"{family} models have massive activations, a few tokens orders of magnitude above the rest: one scale clips "
        "them or leaves the rest few codes",
        "a scale per token (fp8_dynamic)",
    )


def _head(case: Case) -> Said | None:
    heads = [
        group for group in case.served.groups if _is_head(group, case.served) and group.linear is not None
    ]
    if not heads:
        return None
    saved = sum(group.matrix.parameters * group.dtype.bits / 8 - group.nbytes for group in heads)
    share = saved / max(streamed(case.served), 1)
    return (
        f"a quantized output head ({heads[0].scheme})",
        "its error goes into the logits directly, where no later layer mends it; it spares "
        f"{100 * share:.2g} % of what a step reads",
        "leave lm_head wide, as every preset does",
    )  # fmt: skip


def _is_head(group: Group, served: Served) -> bool:
    role = group.matrix.role
    return role is Role.LM_HEAD or (served.geometry.tied and role is Role.EMBEDDING)


def _overflow(case: Case) -> Said | None:
    geometry, gpu = case.served.geometry, case.question.gpu
    known = fp16_families.get(geometry.family)
    stored = geometry.dtype == "fp16"
    forced = bool(gpu.formats) and "bf16" not in gpu.formats and "fp16" in gpu.formats
    if known is None or not (stored or forced):
        return None
    because = "the config says float16" if stored else f"{gpu.name} has no BF16, so engines fall back to FP16"
    refused = f"; {', '.join(known.refused_by)} refuses it" if known.refused_by else ""
    return (
        f"{geometry.family} in FP16",
        f"{because}, and {known.reason}{refused} ({known.source})",
        "bfloat16" if stored else "a GPU with BF16, or float32",
    )


def _slow_int8(case: Case) -> Said | None:
    names = case.named(lambda layer: input_kind(layer.linear).startswith("int8"))
    if not names or INT8_SLOW not in case.question.gpu.notes:
        return None
    return f"INT8 arithmetic ({names})", INT8_SLOW, "FP8 or FP4, which its units are made for"


def _fnuz(case: Case) -> Said | None:
    names = case.named(
        lambda layer: weight_kind(layer.linear.weight).startswith("fp8") and layer.path.low_precision
    )
    if not names or FNUZ not in case.question.gpu.notes:
        return None
    return (
        f"E4M3FN bytes for kernels of your own ({names})",
        f"{FNUZ}; read as they are, values are halved",
        "let the engine load it; for other code `narrowcast.recode(q, ...)` to E4M3FNUZ first",
    )


def _emulated(case: Case) -> Said | None:
    names = case.named(lambda layer: layer.path.refusal is None and layer.path.arithmetic == EMULATED)
    if not names:
        return None
    where = f"{case.question.engine} has no kernel for it on {case.question.gpu.name}"
    return (
        f"emulated formats ({names})",
        f"{where}: weights are decoded to 16 bits at every step, slower than an unquantized model",
        "a preset that runs natively or as weight only" if not case.served.quantized
        else "convert it (`narrowcast convert`), or another GPU",
    )  # fmt: skip


def _cut_blocks(case: Case) -> Said | None:
    """Blocks that a split or a fused layer cuts, where scales are then applied to neighbours without a word."""
    served, question = case.served, case.question
    for group in served.groups:
        matrix, linear = group.matrix, group.linear
        if (
            linear is None
            or matrix.split == "whole"
            or not misplaces(question.engine, served.container, linear, bool(matrix.fused))
        ):
            continue  # fmt: skip
        last = not matrix.fused or matrix.leaf == matrix.fused[-1]
        said = tp_problems(
            question.engine, served.container, linear, matrix.shape, question.tp, matrix.split,
            fused=bool(matrix.fused), last=last,
        )  # fmt: skip
        if said is not None:
            return (
                f"128x128 blocks that end inside a fused layer ({matrix.leaf}: {said})",
                "vLLM loads it without an error and applies scales to rows of the neighbour",
                "a tensor-parallel size that keeps blocks whole, or fp8_dynamic",
            )
    return None


def _divided(case: Case) -> Said | None:
    reason = stopped(case.served, case.question)
    if reason is None:
        return None
    return (
        f"tensor-parallel {case.question.tp}",
        f"{reason}, so that a block, a group, a packed word or a head would be cut",
        "a size that keeps every matrix whole, pipeline stages, or experts spread one by one (--ep)",
    )


def _above_heads(case: Case) -> Said | None:
    tp = case.question.tp
    heads = [a.kv_heads for a in case.served.geometry.attention if a.kind in ("full", "sliding", "chunked")]
    fewest = min(heads, default=tp)
    if tp <= fewest:
        return None
    return (
        f"tensor-parallel {tp} with {fewest} KV heads",
        f"each KV head is kept by {tp / fewest:.3g} GPUs: weights are spread further, the cache is not",
        f"--tp {fewest} and the rest as pipeline stages or replicas",
    )


def _latent_split(case: Case) -> Said | None:
    if case.question.tp == 1 or not any(a.kind == "latent" for a in case.served.geometry.attention):
        return None
    return (
        f"tensor-parallel {case.question.tp} to make room for a latent cache",
        "the latent has one head, which every GPU keeps whole",
        "data parallel attention with expert parallelism (--ep), where the engine has it",
    )


def _old_name(case: Case) -> Said | None:
    if case.served.quantized or case.question.engine != "vllm":
        return None
    return (
        "`--quantization fp8` on this unquantized checkpoint",
        "an old name: vLLM 0.32 warns and takes fp8_per_tensor, one scale for a whole matrix",
        "--quantization fp8_per_channel",
    )


def _tiny_batch(case: Case) -> Said | None:
    names = case.named(lambda layer: layer.linear.input is not None and layer.path.low_precision)
    batch, crossover = case.question.batch, case.crossover
    if not names or crossover is None or batch >= crossover:
        return None
    return (
        f"low-precision arithmetic for a faster decode step at batch {batch}",
        f"up to about batch {crossover:,.0f} a step waits for bytes, which quantized inputs do not make fewer",
        "fewer bits of the weights and of the cache; quantized inputs pay in prefill and in larger batches",
    )


def _unity(case: Case) -> Said | None:
    mode = cache_mode(case.served, case.question)
    if (
        mode.scales == "none" or mode.name == "fp8_e5m2" or case.served.kv_scales
    ):  # E5M2 reaches 57344 without one
        return None
    latent = any(a.kind == "latent" for a in case.served.geometry.attention)
    return (
        f"a cache in {mode.name} without scales",
        "the checkpoint brings none, and engines take 1.0 without asking: what lies beyond the format's largest value "
        "is clipped",
        "`narrowcast calibrate-kv`"
        + ("" if latent else ", or a mode whose scales are made on the fly (fp8_per_token_head)"),
    )


def _too_long(case: Case) -> Said | None:
    positions, context = case.served.geometry.positions, case.question.context
    if positions is None or context <= positions:
        return None
    return (
        f"contexts of {context:,} tokens",
        f"the config has {positions:,} positions; engines refuse more, or the text falls apart",
        f"--context {positions}, or a rope_scaling that the model was trained with",
    )


ROWS: tuple[Row, ...] = (
    Row("fp8-for-speed", _fp8_for_speed, "capabilities of the GPU; the engine's list of kernels"),
    Row("fp4-for-arithmetic", _fp4_for_speed, "capabilities of the GPU; the engine's list of kernels"),
    Row("emulated", _emulated, "the engine's list of kernels"),
    Row("static-inputs", _static, "arXiv 2405.14428 (Llama, Mistral, Mixtral, Gemma), 2605.15572 (Gemma 3)"),
    Row("quantized-head", _head, "llm-compressor's examples (ignore=[\"lm_head\"])"),
    Row("fp16-overflow", _overflow, "narrowcast.hardware.overflow"),
    Row("slow-int8", _slow_int8, "datasheets that contradict each other"),
    Row("fnuz", _fnuz, "AMD CDNA3; vLLM 0.32 normalize_e4m3fn_to_e4m3fnuz"),
    Row("kv-without-scales", _unity, "vLLM 0.32 quantization/kv_cache.py, SGLang 0.5.23"),
    Row("cut-blocks", _cut_blocks, "vLLM 0.32, run on a CPU (narrowcast.hardware.tensor_parallel)"),
    Row("cut-by-ranks", _divided, "vLLM 0.32 and SGLang 0.5.23 (narrowcast.serving.splits)"),
    Row("replicated-heads", _above_heads, "vLLM 0.32 (get_num_kv_heads: at least one for each rank)"),
    Row("latent-replicated", _latent_split, "vLLM 0.32 (MLA has one KV head)"),
    Row("old-fp8-name", _old_name, "vLLM 0.32 quantization/fp8.py"),
    Row("arithmetic-at-small-batch", _tiny_batch, "the roofline of this plan"),
    Row("beyond-positions", _too_long, "config.json max_position_embeddings"),
)  # fmt: skip
