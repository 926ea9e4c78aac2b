"""What engines call things on their command lines: a row for every name, and what the name means there.

    find("fp8")                       vLLM's method and cache, SGLang's method, TensorRT-LLM's algorithm
    rows("vllm", METHOD)              every name that --quantization takes

The same word means different things: SGLang's ``--quantization fp8`` quantizes a BF16 checkpoint per output channel,
vLLM's reads FP8 checkpoints; vLLM's KV cache ``auto`` follows what the checkpoint says and SGLang's only for ModelOpt's
FP8. So a row belongs to one engine and one flag. ``says`` is the engine's own message, word for word.

Left out: attention backends, which are about layers rather than names; and names that plug-ins register.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.hardware.engines.row import ENGINES

# The engines that have rows, and the versions whose lists they cover, oldest first.
VERSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"vllm": ("0.32.0", "0.33.0"), "sglang": ("0.5.23",), "tensorrt-llm": ("PyTorch backend, 2026",)}
)

METHOD, CACHE, DTYPE, KEY = "quantization", "KV cache", "dtype", "format of a layer"
LINEAR, EXPERTS, FP8_GEMM, FP4_GEMM = "linear backend", "expert backend", "FP8 backend", "FP4 backend"
FLAGS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("vllm", METHOD): "--quantization",
        ("vllm", KEY): "--quantization-config",
        ("vllm", CACHE): "--kv-cache-dtype",
        ("vllm", DTYPE): "--dtype",
        ("vllm", LINEAR): "--linear-backend",
        ("vllm", EXPERTS): "--moe-backend",
        ("sglang", METHOD): "--quantization",
        ("sglang", CACHE): "--kv-cache-dtype",
        ("sglang", DTYPE): "--dtype",
        ("sglang", FP8_GEMM): "--fp8-gemm-backend",
        ("sglang", FP4_GEMM): "--fp4-gemm-backend",
        ("sglang", EXPERTS): "--moe-runner-backend",
        ("tensorrt-llm", METHOD): "quant_algo",
        ("tensorrt-llm", CACHE): "kv_cache_quant_algo",
    }
)
KINDS = tuple(dict.fromkeys(kind for _, kind in FLAGS))

# What a name does. A method reads checkpoints, quantizes while loading, or either, as the checkpoint asks.
READS, ONLINE, EITHER, ALIAS = "reads", "online", "reads or online", "alias"
DEPRECATED, REFUSED, OUT = "deprecated", "refused", "out of scope"
STORES, COMPUTES, PREFERS, AUTO = "stores", "computes", "prefers", "automatic"
DOES = (READS, EITHER, ONLINE, ALIAS, DEPRECATED, REFUSED, OUT, AUTO, STORES, COMPUTES, PREFERS)


@dataclass(frozen=True)
class Name:
    """One word of one engine's flag: what it is and what it means.

    ``instead`` is the name to write in its place, for aliases and what is deprecated. ``containers`` are ours that a
    method reads. ``weights`` and ``inputs`` are schemes of ours that quantizing while loading makes ("wide": left in 16
    bits; several, separated by " or ", where it depends), for layers that ``only`` names or for all. ``low`` is the
    compute capability that the engine asks for, None where it asks for none or has no NVIDIA kernel. For a KV cache
    ``storage`` and ``scales`` say what a token's row holds and where its scales come from, ``mode`` is our cache mode
    and ``backends`` the attention backends that take it; for a backend, ``backends`` are the kernels it stands for.
    ``since`` and ``until`` are the first and last version that has the name, where it is not in all of VERSIONS.
    ``writes`` are the flags by which the engine writes such a checkpoint.
    """

    name: str
    engine: str
    kind: str
    does: str
    means: str
    instead: str = ""
    containers: tuple[str, ...] = ()
    weights: str = ""
    inputs: str = ""
    only: str = ""
    low: int | None = None
    storage: str = ""
    scales: str = ""
    mode: str = ""
    backends: tuple[str, ...] = ()
    says: str = ""
    since: str = ""
    until: str = ""
    writes: str = ""

    @property
    def flag(self) -> str:
        """The flag, or the key of a configuration file, that takes the name."""
        return FLAGS[self.engine, self.kind]

    @property
    def title(self) -> str:
        """The engine's name as people write it."""
        return ENGINES[self.engine]

    def holds(self, version: str) -> bool:
        """Whether the version, one of VERSIONS, has the name."""
        known = VERSIONS[self.engine]
        at = known.index(version)
        first = known.index(self.since) if self.since else 0
        last = known.index(self.until) if self.until else len(known) - 1
        return first <= at <= last


@dataclass(frozen=True)
class Factoring:
    """One thing that both engines do, and the words for it in each; "" where an engine does not do it."""

    what: str
    vllm: str
    sglang: str
    note: str = ""


@dataclass(frozen=True)
class Change:
    """What a version changed against the one before: names that came (added), went (removed) or moved (moved), in
    a list of the engine's source. ``means`` says what that is for."""

    engine: str
    version: str
    where: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    means: str = ""


def cache(
    engine: str, name: str, means: str, mode: str, storage: str, scales: str, does: str = STORES, **more: Any
) -> Name:
    """The row of a word for a KV cache."""
    return Name(name, engine, CACHE, does, means, mode=mode, storage=storage, scales=scales, **more)


@lru_cache
def every() -> tuple[Name, ...]:
    """All rows of all engines, vLLM's first."""
    files = ("vllm", "backends", "sglang", "tensorrt_llm")
    found = [row for file in files for row in import_module(f"narrowcast.hardware.names.{file}").ROWS]
    return tuple(sorted(found, key=lambda row: (list(VERSIONS).index(row.engine), KINDS.index(row.kind))))


def rows(engine: str | None = None, kind: str | None = None) -> tuple[Name, ...]:
    """The rows of an engine, of a kind, or of both."""
    return tuple(row for row in every() if engine in (None, row.engine) and kind in (None, row.kind))


def find(
    name: str, engine: str | None = None, kind: str | None = None, *, among: Collection[str] = ()
) -> tuple[Name, ...]:
    """Every row of that name, in any case and with - for _; of one engine, or of those ``among`` which to look (none:
    all). UsageError with the nearest names where there is none."""
    where = (engine,) if engine is not None else tuple(among)
    asked = [row for row in rows(None, kind) if not where or row.engine in where]
    found = tuple(row for row in asked if _key(row.name) == _key(name))
    if not found:
        whose = " and ".join(ENGINES.get(each, each) for each in where)
        raise UsageError(
            f"no such name in {whose}" if where else "neither an engine nor a name that one takes",
            got=name, remedy=_remedy(name, asked, where),
        )  # fmt: skip
    return found


def _remedy(name: str, asked: Iterable[Name], where: tuple[str, ...]) -> str:
    """The nearest names, of engines too, or where to look."""
    known = {_key(row.name): row.name for row in asked} | (
        {} if where else {_key(each): each for each in ENGINES}
    )
    near = [known[key] for key in difflib.get_close_matches(_key(name), known, 4)]
    if near:
        return f"did you mean {', '.join(near)}?"
    listed = where[0] if where and where[0] in VERSIONS else "vllm"
    return f"`narrowcast engines {listed}` lists its names"


def _key(name: str) -> str:
    return name.lower().replace("-", "_")
