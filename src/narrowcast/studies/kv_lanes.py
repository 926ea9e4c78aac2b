"""KV caches as further lanes of the child: each mode under every kind of scale that is at hand.

    unity      no scale: 1.0, what engines take where a checkpoint brings none
    stored     the checkpoint's own
    computed   from statistics of ``narrowcast calibrate``, or an overlay of ``narrowcast calibrate-kv``

A mode that takes no scale beforehand is one lane. Attention in FP8 reads the codes of an FP8 cache, so it needs a model
of its own that attends so, and is one more lane for each of those caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.containers.spelling import widened
from narrowcast.errors import UsageError
from narrowcast.jobs.cache_scales import CacheScales, read_overlay
from narrowcast.jobs.fingerprint import fingerprint, kinship
from narrowcast.jobs.stats import read
from narrowcast.runtime.attend import attend_in
from narrowcast.runtime.caches import CacheFactory, KVScales, cache_mode
from narrowcast.runtime.lanes import Lane
from narrowcast.runtime.walk import Running

STATISTIC = "amax"
OF_E4M3 = {"fp8_e4m3": "fp8", "fp8_head": "fp8_head"}  # modes with E4M3 scales, as statistics call them


@dataclass(frozen=True)
class CacheLane:
    """One lane: what the report calls it, and the factory that counts what went in."""

    name: str
    mode: str
    run: Running
    cache: CacheFactory

    @property
    def lane(self) -> Lane:
        return Lane(self.name, self.run, self.cache)


def cache_lanes(
    child: Running,
    modes: Sequence[str],
    scales: str | Path | None,
    attention: str | None,
    again: Callable[[], Running],
    stack: ExitStack,
) -> list[CacheLane]:
    """Every mode, then FP8 attention over those that it can read. ``again`` opens the child a second time.

    Raises UsageError for an unknown mode, and for scales or FP8 attention without a mode that takes them.
    """
    modes = list(dict.fromkeys(cache_mode(mode).name for mode in modes))
    reads = [mode for mode in modes if mode in OF_E4M3]
    if not reads and (scales is not None or attention is not None):
        raise UsageError(
            "no cache mode that takes these", got=", ".join(modes) or "none",
            wanted=f"--kv with {' or '.join(OF_E4M3)}",
        )  # fmt: skip
    found = [
        CacheLane(name, mode, child, CacheFactory(child.config, mode, own))
        for mode in modes
        for name, own in _scaled(child, mode, scales)
    ]
    if attention is not None:
        other = stack.enter_context(again())
        attend_in(other.model, attention)
        found += [_attending(one, other, attention) for one in found if one.mode in reads]
    return found


def _attending(one: CacheLane, run: Running, attention: str) -> CacheLane:
    cache = CacheFactory(run.config, one.mode, one.cache.scales)
    return CacheLane(f"{one.name}, {attention} attention", one.mode, run, cache)


def _scaled(child: Running, mode: str, file: str | Path | None) -> Iterator[tuple[str, KVScales | None]]:
    """The names of a mode's lanes, with their scales."""
    if mode not in OF_E4M3:
        yield mode, None
        return
    yield f"{mode}, unity", None
    stored = stored_scales(child)
    if stored is not None and all(scale.size == 1 for scale in stored.k.values()):
        yield f"{mode}, stored", stored
    if file is not None:
        made = _of_file(child, mode, file)
        yield f"{mode}, computed", KVScales(k=made.by_layer("k"), v=made.by_layer("v"))


def _of_file(child: Running, mode: str, file: str | Path) -> CacheScales:
    """Scales from statistics or an overlay, of this model or its parent. UsageError for any other's."""
    given = read_overlay(file)
    made = given if given is not None else CacheScales.of(read(file), STATISTIC, OF_E4M3[mode])
    made.check_model(fingerprint(child.opened.checkpoint), kinship(child.opened), child.root)
    if made.kv != OF_E4M3[mode]:
        fits = next(name for name, kv in OF_E4M3.items() if kv == made.kv)
        raise UsageError("these scales are for another cache mode", where=file, got=mode, wanted=fits)
    return made


def stored_scales(run: Running) -> KVScales | None:
    """The scales of keys and values that the checkpoint brings; None where it brings none."""
    sides: dict[str, dict[int, np.ndarray]] = {"k": {}, "v": {}}
    source = run.opened.checkpoint
    for scale in run.opened.contents.cache_scales:
        number = re.search(r"\.(\d+)\.", scale.attention)
        value = widened(source.array(scale.tensor), source.entries[scale.tensor].dtype.name)
        for side in ("k", "v") if scale.which == "kv" else (scale.which,):
            if number is not None and side in sides:
                sides[side][int(number[1])] = np.asarray(value, np.float32).reshape(-1)
    return KVScales(k=sides["k"], v=sides["v"]) if sides["k"] or sides["v"] else None
