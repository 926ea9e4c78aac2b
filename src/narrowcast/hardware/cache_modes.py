"""What a KV cache may hold, and what it takes: one row for each way of storing that an engine has, in bytes.

    head of one token     row(k_dim) + row(v_dim)      K and V; codes first, scales inside the row behind them
    latent of one token   latent(rank + rotary part)   multi-head latent attention: one vector, read as K and as V

A scale for a whole tensor or head takes no room that counts. An engine's own words for a row are kept apart by engine,
since the same word may mean another thing, and any of them finds its row.

Sources: vLLM 0.32 (config/cache.py; v1/kv_cache_interface.py and the backends' customize_spec; quantization/turboquant;
v1/attention/ops/ultraquant; mla/flashmla_sparse.py), SGLang 0.5.23 (arg_groups/fields/model.py, mem_cache/), ModelOpt
0.47's kv_cache_quant_algo for TensorRT-LLM. Left out: DeepSeek V4's compressed caches and the index keys of sparse
attention, which belong to a model rather than to a mode, and SGLang's one layer of workspace beside an FP4 cache.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import ENGINES

Scales = Literal["none", "tensor", "head", "global"]


@dataclass(frozen=True)
class CacheModeRow:
    """``row_bytes`` is what K or V of one head takes for one token by its number of elements, which ``multiple``
    divides; ``slot`` what both take, by those of K, where a backend packs them as one. ``latent`` is the same for a
    latent: None where an engine has no such cache, and 0 bytes for a size that the layout does not fit. ``engines`` are
    those that have it, with their words for it, ``latent_engines`` those that store latents so.

    ``scales`` says which are known beforehand: of a tensor, of a head, "global" (on top of those in the row), or none.
    ``wide_layers`` first and as many last layers of a model without states stay in 16 bits. ``heads``: whether heads
    can be stored so at all, or latents alone.
    """

    name: str
    engines: Mapping[str, tuple[str, ...]]
    scales: Scales
    row_bytes: Callable[[int], int]
    multiple: int = 1
    slot: Callable[[int], int] | None = None
    latent: Callable[[int], int] | None = None
    latent_engines: tuple[str, ...] = ()
    wide_layers: int = 0
    heads: bool = True
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def spelled(self) -> tuple[str, ...]:
        """The engines and their words, to be read: ``vLLM fp8, fp8_e4m3``."""
        return tuple(f"{ENGINES[key]} {', '.join(words)}".strip() for key, words in self.engines.items())

    def head_bytes(self, k_dim: int, v_dim: int) -> int:
        """Bytes of K and V of one head and token. UsageError for dimensions that the mode cannot divide."""
        for dim in (k_dim, v_dim):
            if dim % self.multiple or not self.heads:
                raise UsageError(
                    f"{self.name} cannot store heads of {dim} elements",
                    wanted=f"a multiple of {self.multiple}" if self.heads else "latents",
                )
        if self.slot is not None:
            return self.slot(k_dim)
        return self.row_bytes(k_dim) + self.row_bytes(v_dim)

    def latent_bytes(self, dim: int) -> int:
        """Bytes of a latent with its rotary part, ``dim`` elements, of one token. UsageError where there is none."""
        found = self.latent(dim) if self.latent is not None and dim % self.multiple == 0 else 0
        if not found:
            raise UsageError(f"{self.name} stores no latents of {dim} elements", wanted="bf16 or fp8_e4m3")
        return found


def _half(dim: int) -> int:
    return 2 * dim


def _byte(dim: int) -> int:
    return dim


def _fp4(group: int) -> Callable[[int], int]:
    """Two elements in a byte, and one byte of scale for each group."""
    return lambda dim: dim // 2 + dim // group


def _only(dim: int, nbytes: int) -> Callable[[int], int]:
    return lambda asked: nbytes if asked == dim else 0


def _turboquant(name: str, key_bits: int, value_bits: int) -> CacheModeRow:
    """Keys in FP8, or as indices of a codebook with an fp16 norm; values with an fp16 scale and an fp16 zero point."""

    def key(dim: int) -> int:
        return dim if key_bits == 8 else -(-dim * key_bits // 8) + 2

    def slot(dim: int) -> int:
        total = key(dim) + -(-dim * value_bits // 8) + 4
        return total + total % 2

    return CacheModeRow(name, {"vllm": (name,)}, "none", key, slot=slot, wide_layers=2)


_EVERY = ("vllm", "sglang", "tensorrt-llm")
_DS_MLA = 512 + 64  # the latent's rank and the rotary part that the packed layouts are made for

_ROWS = (
    CacheModeRow(
        "bf16",
        {
            "vllm": ("auto", "bfloat16", "float16"),
            "sglang": ("auto", "bf16", "bfloat16"),
            "tensorrt-llm": ("auto",),
            "transformers": (),
        },
        "none", _half, latent=_half, latent_engines=(*_EVERY, "transformers"), aliases=("fp16", "16bit"),
        note="the model's own 16-bit dtype",
    ),
    CacheModeRow(
        "fp8_e4m3",
        {"vllm": ("fp8", "fp8_e4m3"), "sglang": ("fp8_e4m3",), "tensorrt-llm": ("fp8",)},
        "tensor", _byte, latent=_byte, latent_engines=_EVERY,
        note="sparse latent attention stores fp8_ds_mla instead", aliases=("kv8",),
    ),
    CacheModeRow(
        "fp8_e5m2", {"vllm": ("fp8_e5m2",), "sglang": ("fp8_e5m2",)}, "tensor", _byte,
        latent=_byte, latent_engines=("vllm", "sglang"),
    ),
    CacheModeRow("fp8_inc", {"vllm": ("fp8_inc",)}, "tensor", _byte, note="Intel Gaudi"),
    CacheModeRow(
        "fp8_head", {"vllm": ("from a compressed-tensors checkpoint with strategy attn_head",)}, "head", _byte,
        aliases=("kv8_head",),
    ),
    CacheModeRow("int8", {"tensorrt-llm": ("int8",)}, "tensor", _byte, note="engines built ahead of time"),
    CacheModeRow("fp8_per_token_head", {"vllm": ("fp8_per_token_head",)}, "none", lambda dim: dim + 4),
    CacheModeRow("int8_per_token_head", {"vllm": ("int8_per_token_head",)}, "none", lambda dim: dim + 4),
    CacheModeRow(
        "int4_per_token_head", {"vllm": ("int4_per_token_head",)}, "none", lambda dim: dim // 2 + 4, 2
    ),
    CacheModeRow(
        "nvfp4", {"vllm": ("nvfp4",), "sglang": ("nvfp4",), "tensorrt-llm": ("nvfp4",)}, "global", _fp4(16), 16,
        latent=_fp4(16), latent_engines=("sglang",), aliases=("kvnv4",),
    ),
    CacheModeRow(
        "nvfp4_4over6", {"vllm": ("nvfp4_4over6",)}, "global", _fp4(16), 16,
        note="each block's scale from its largest element over 6 or over 4, whichever errs less",
    ),
    CacheModeRow("mxfp8", {"sglang": ("mxfp8",)}, "none", lambda dim: dim + dim // 32, 32),
    CacheModeRow(
        "fp4_mx_block16", {"sglang": ("fp4_mx_block16",)}, "none", _fp4(16), 16,
        latent=_fp4(16), latent_engines=("sglang",),
    ),
    CacheModeRow(
        "ultraquant_4bit", {"vllm": ("ultraquant_4bit",)}, "none", _fp4(32), 32, lambda dim: 2 * _fp4(32)(dim),
        wide_layers=2,
    ),
    _turboquant("turboquant_k8v4", 8, 4),
    _turboquant("turboquant_4bit_nc", 4, 4),
    _turboquant("turboquant_k3v4_nc", 3, 4),
    _turboquant("turboquant_3bit_nc", 3, 3),
    CacheModeRow(
        # 512 codes, four fp32 scales, 64 rotary elements in bf16
        "fp8_ds_mla", {"vllm": ("fp8_ds_mla",)}, "none", _byte,
        latent=_only(_DS_MLA, 512 + 4 * 4 + 2 * 64), latent_engines=("vllm",), heads=False,
        note="latents of 512 + 64 only",
    ),
    CacheModeRow(
        # 512 codes in four bits, 64 rotary elements in e4m3, a scale for each 16 codes
        "nvfp4_ds_mla", {"vllm": ("nvfp4_ds_mla",)}, "none", _fp4(16),
        latent=_only(_DS_MLA, 512 // 2 + 64 + 512 // 16), latent_engines=("vllm",), heads=False,
        note="latents of 512 + 64 only",
    ),
)  # fmt: skip


class CacheModes(Mapping[str, CacheModeRow]):
    """The rows by name, by alias and by engines' words; unknown names are refused with the nearest ones."""

    def __init__(self, rows: tuple[CacheModeRow, ...]) -> None:
        self._rows = {row.name: row for row in rows}
        words = {word: row for row in rows for spelled in row.engines.values() for word in spelled}
        self._all = words | {alias: row for row in rows for alias in row.aliases} | self._rows

    def __getitem__(self, name: str) -> CacheModeRow:
        found = self._all.get(name.lower())
        if found is None:
            near = difflib.get_close_matches(name.lower(), self._all, 3)
            remedy = f"did you mean {', '.join(near)}?" if near else None
            raise UsageError(
                "unknown mode of the KV cache", got=name, wanted=", ".join(self._rows), remedy=remedy
            )
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, engine: str, *, latent: bool = False) -> tuple[CacheModeRow, ...]:
        """The rows that an engine has, for heads or for latents."""
        return tuple(
            row
            for row in self._rows.values()
            if (engine in row.latent_engines if latent else engine in row.engines and row.heads)
        )


CACHE_MODES = CacheModes(_ROWS)

# Engines whose "auto" takes some modes from the configs of some containers alone; others follow every config they read.
_FOLLOWED: Mapping[str, Mapping[str, tuple[str, ...]]] = {"sglang": {"fp8_e4m3": ("modelopt",)}}


def follows(engine: str, mode: str, container: str | None) -> bool:
    """Whether an engine's "auto" becomes the mode, by its name here, that the config of a checkpoint asks for."""
    followed = _FOLLOWED.get(engine)
    return followed is None or container in followed.get(mode, ())
