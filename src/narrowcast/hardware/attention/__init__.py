"""In which precision attention is computed, beside how its keys and values are stored: the two are not the same.

    storage      half or a quarter of the bytes, whatever multiplies them
    arithmetic   low only where the kernel takes a quantized query too, and the GPU has the instruction

    attention_path("vllm", gpus["h100"], "fp8_e4m3", "full", 128)  →  FLASH_ATTN, fp8
    attention_path("vllm", gpus["a100"], "fp8_e4m3", "full", 128)  →  FLASHINFER, bf16: dequantized
    attention_path("vllm", gpus["a100"], "fp8_e4m3", "full", 80)   →  refused: Triton has no FP8 before 8.9

Backends come in the engine's order; those that need a package are named in the notes. One that is chosen and then
raises is a refusal, since engines do not go on to the next.

Left out: choices by flags, and kernels that a backend picks by the size of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

from narrowcast.hardware.attention.row import MODE, Attention, Backend, Layout
from narrowcast.hardware.cache_modes import CACHE_MODES, CacheModeRow
from narrowcast.hardware.engines import ENGINES, engines
from narrowcast.hardware.engines.row import UNKNOWN
from narrowcast.hardware.gpus import GPU

_TABLES: Mapping[str, tuple[str, str]] = {
    "vllm": ("vllm", "ATTENTION"),
    "sglang": ("others", "SGLANG"),
    "tensorrt-llm": ("others", "TENSORRT_LLM"),
    "transformers": ("others", "TRANSFORMERS"),
}
_STATE = "a recurrent layer keeps a state and no keys: no mode of the KV cache touches it"


@dataclass(frozen=True)
class AttentionPath:
    """Backends in the order in which the engine would take them, the arithmetic of the first for QKᵀ and PV in a decode
    step and in a prefill, and how keys and values are stored; or the refusal in the engine's words and what would
    change it. ``package`` is what has to be there for any backend at all."""

    engine: str
    version: str
    backends: tuple[str, ...]
    arithmetic: str
    prefill: str
    storage: str
    refusal: str | None
    remedy: str | None
    notes: tuple[str, ...]
    source: str
    package: str = ""

    @property
    def low_precision(self) -> bool:
        """Whether the products of a decode step are really computed in a low precision."""
        return self.refusal is None and self.arithmetic.startswith("fp8")


def attention_path(
    engine: str,
    gpu: GPU,
    kv_mode: str,
    kind: str,
    head_dim: int,
    *,
    sinks: bool = False,
    sparse: bool = False,
) -> AttentionPath:
    """What computes attention over a cache of ``kv_mode`` (a name or word of ``CACHE_MODES``) in layers of ``kind``
    (full, sliding, chunked, latent, state) whose heads have ``head_dim`` elements; of latents the whole row.

    ``sinks``: the model has attention sinks; ``sparse``: it attends to chosen tokens only (DeepSeek V3.2). UsageError
    for an engine or a mode that there is not.
    """
    table, mode = _table(engine), CACHE_MODES[kv_mode]
    if kind == "state":
        return _path(table, (), "bf16", "bf16", "the model's dtype", notes=(_STATE,))
    if table.engine not in mode.engines and table.engine != "transformers":
        modes = ", ".join(row.name for row in CACHE_MODES.of(table.engine))
        return _refused(table, mode, f"{ENGINES[table.engine]} has no {mode.name} cache", f"one of {modes}")
    layout: Layout = "heads" if kind != "latent" else "sparse" if sparse else "latent"
    order = _order(table, layout, gpu, mode)
    if order is None:
        said = f"{ENGINES[table.engine]} {table.version} on {gpu.name}: no backends known here"
        return _path(table, (), UNKNOWN, UNKNOWN, mode.name, notes=(said,))
    found, reasons = _tried(
        table, order, lambda row: row.lacks(gpu, mode.name, head_dim, kind == "sliding", sinks)
    )
    if not found:
        said = ", ".join(f"{name}: [{', '.join(why)}]" for name, why in reasons.items())
        return _refused(table, mode, table.refusal.format(gpu=gpu.name, reasons=said), _other(reasons, gpu))
    return _accepted(table, mode, gpu, found, head_dim)


def _table(engine: str) -> Attention:
    module, name = _TABLES[engines[engine].name]
    table: Attention = getattr(import_module(f"narrowcast.hardware.attention.{module}"), name)
    return table


def _order(table: Attention, layout: Layout, gpu: GPU, mode: CacheModeRow) -> tuple[str, ...] | None:
    """The backends that the engine tries on this GPU, None where none are known."""
    when = "wide" if mode.name == "bf16" else "quantized"
    return next(
        (
            order.names
            for order in table.orders
            if order.layout == layout and order.reach.holds(gpu) and order.when in ("", when)
        ),
        None,
    )


def _tried(
    table: Attention, order: Iterable[str], lacks: Callable[[Backend], list[str]]
) -> tuple[list[Backend], dict[str, list[str]]]:
    """The first fitting row of each backend in order, and why the others fit not, by the row that comes nearest."""
    found, reasons = [], {}
    for name in order:
        rows = table.rows(name)
        row = next((row for row in rows if not lacks(row)), None)
        if row is None:
            reasons[name] = min((lacks(row) for row in rows), key=lambda why: (MODE in why, len(why)))
        else:
            found.append(row)
    return found, reasons


def _other(reasons: Mapping[str, list[str]], gpu: GPU) -> str | None:
    """What would help, where every backend of this GPU lacks the mode: 16 bits by name, since auto follows configs."""
    word = "bfloat16" if "bf16" in gpu.formats else "float16"
    return f"--kv-cache-dtype {word}" if any(MODE in why for why in reasons.values()) else None


def _accepted(
    table: Attention, mode: CacheModeRow, gpu: GPU, found: list[Backend], head_dim: int
) -> AttentionPath:
    default = [row for row in found if not row.package]
    first = (default or found)[0]
    if first.failure is not None:
        later = next((row.name for row in default[1:] if row.failure is None), None)
        remedy = f"--attention-backend {later}" if later else first.remedy
        return _refused(table, mode, f"{first.name}: {first.failure}", remedy, first.notes)
    wide = "bf16" if "bf16" in gpu.formats else "fp16"
    arithmetic, prefill = (
        word.replace("bf16", wide) for word in (first.arithmetic, first.prefill or first.arithmetic)
    )
    ahead = found[: found.index(first)] if default else []
    notes = [
        _words(mode, arithmetic, head_dim, wide), *first.notes,
        *(f"with {row.package}, {row.name} would come before" for row in ahead),
        *(() if default else (f"only with {first.package}",)),
    ]  # fmt: skip
    if gpu.fp8_kind == "fnuz" and mode.name.startswith("fp8"):
        notes.append("this GPU stores E4M3FNUZ, which reaches 240 instead of 448")
    storage = wide if mode.name == "bf16" else mode.name
    names = tuple(dict.fromkeys(row.name for row in default or found if row.failure is None))
    return _path(
        table, names, arithmetic, prefill, storage, notes=tuple(filter(None, notes)),
        package="" if default else first.package,
    )  # fmt: skip


def _words(mode: CacheModeRow, arithmetic: str, head_dim: int, wide: str) -> str:
    """The two of them in one sentence; nothing where both are wide or the arithmetic is not known."""
    if mode.name == "bf16" or arithmetic == UNKNOWN:
        return ""
    if arithmetic == "fp8":
        return f"fp8 attention over {_a(mode.name)} cache: query, keys and values are multiplied in 8 bits"
    share = "fewer bytes"
    if head_dim % mode.multiple == 0 and "ds_mla" not in mode.name:
        part = mode.head_bytes(head_dim, head_dim) / (4 * head_dim)
        share = "half the bytes" if part == 0.5 else f"{part:.0%} of the bytes"
    word = arithmetic.partition(":")[0]
    means = "the same arithmetic" if word == wide else "decoded in the kernel"
    return f"{word} attention over {_a(mode.name)} cache: {share}, {means}"


def _a(name: str) -> str:
    return f"an {name}" if name.startswith(("fp8", "fp4", "int", "nvfp4", "mxfp8", "ultra")) else f"a {name}"


def _path(
    table: Attention, backends: tuple[str, ...], arithmetic: str, prefill: str, storage: str, *,
    notes: tuple[str, ...] = (), refusal: str | None = None, remedy: str | None = None, package: str = "",
) -> AttentionPath:  # fmt: skip
    return AttentionPath(
        table.engine, table.version, backends, arithmetic, prefill, storage, refusal, remedy, notes, table.source,
        package,
    )  # fmt: skip


def _refused(
    table: Attention, mode: CacheModeRow, reason: str, remedy: str | None, notes: tuple[str, ...] = ()
) -> AttentionPath:
    return _path(
        table, (), UNKNOWN, UNKNOWN, mode.name, notes=notes, refusal=reason, remedy=remedy
    )  # fmt: skip
