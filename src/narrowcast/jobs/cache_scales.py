"""Scales of a KV cache apart from a checkpoint: made from statistics, or in a small file of their own, an overlay.

    scale = amax / 448        stored = fp8(x / scale), and read back as stored · scale; FP8 and NVFP4 caches alike

An overlay is safetensors: ``<attention>.k_scale`` and ``.v_scale``, float32 [1] or [heads, 1, 1], names that every
container's default covers and vLLM maps to its own. Its metadata has the fingerprint of the model that it belongs to,
and a SHA-256 over the scales themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.container import CacheSpelling
from narrowcast.containers.spelling import Array
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.stats import Stats, scale_of
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Reader, Spec, Writer

F32 = NDArray[np.float32]
OVERLAY = "narrowcast-kv-scales-1"
REACH = 448.0
SIDES = ("k", "v")


@dataclass(frozen=True)
class CacheScales:
    """Multipliers by attention path and ``k`` or ``v``, float32 [1] or [heads]; ``kv`` is the scheme of the cache,
    ``fingerprint`` and ``kin`` those of the model that ran."""

    kv: str
    stat: str
    model: str
    fingerprint: str
    kin: str
    scales: Mapping[str, Mapping[str, F32]]
    layer_of: Mapping[str, int]

    @classmethod
    def of(cls, stats: Stats, stat: str, kv: str) -> CacheScales:
        """From statistics: per head where ``kv`` is fp8_head. UsageError for a statistic that heads do not have."""
        heads = kv == "fp8_head"
        scales = {
            path: {which: scale_of(stats.cache_amax(path, which, stat, heads), REACH) for which in SIDES}
            for path, seen in stats.caches.items()
            if set(SIDES) <= set(seen)
        }
        layers = {path: stats.layer_of[path] for path in scales}
        return cls(kv, stat, stats.model, stats.fingerprint, stats.kin, scales, layers)

    def by_layer(self, which: str) -> dict[int, F32]:
        """Multipliers of keys or values by layer index."""
        return {self.layer_of[path]: both[which] for path, both in self.scales.items()}

    def tensors(self, cache: CacheSpelling, attentions: Iterable[str]) -> dict[str, dict[str, Array]]:
        """By attention and then by tensor name, float32, as a container spells them. UsageError for an attention that
        has none."""
        found: dict[str, dict[str, Array]] = {}
        for path in attentions:
            if path not in self.scales:
                raise UsageError(
                    f"there are no keys and values of {path} to make scales from", where=self.model,
                    remedy="calibrate this very model: `narrowcast calibrate`",
                )  # fmt: skip
            found[path] = {
                path + cache.suffixes[which]: _shaped(self.scales[path][which], self.kv, cache.shape)
                for which in SIDES
            }
        return found

    @property
    def sha256(self) -> str:
        """Over all scales with their names."""
        digest = hashlib.sha256()
        for path, both in sorted(self.scales.items()):
            for which, scale in sorted(both.items()):
                digest.update(f"{path} {which}\n".encode() + scale.astype("<f4").tobytes())
        return digest.hexdigest()

    def check_model(self, fingerprint: str, kin: str, where: object) -> None:
        """UsageError where the scales are neither of this checkpoint nor of one that it was made from."""
        if fingerprint != self.fingerprint and kin != self.kin:
            raise UsageError(
                "these scales are of another model", where=where, got=f"of {self.model}",
                wanted="this model, or its parent: the same layers and the same norms",
                remedy=f"`narrowcast calibrate-kv {where} OUT --text FILE` makes them for this one",
            )  # fmt: skip


def _shaped(scale: F32, kv: str, shape: tuple[int, ...]) -> Array:
    return scale.reshape(-1, 1, 1) if kv == "fp8_head" else scale.reshape(shape)


def write_overlay(scales: CacheScales, out: Path, fingerprint: str) -> None:
    """The scales as a small file that belongs to the checkpoint of this fingerprint."""
    cache = CacheSpelling({which: f".{which}_scale" for which in SIDES})
    content = {
        name: array for both in scales.tensors(cache, scales.scales).values() for name, array in both.items()
    }
    metadata = {
        "format": OVERLAY, "kv": scales.kv, "stat": scales.stat, "model": scales.model, "kin": scales.kin,
        "calibrated": scales.fingerprint, "fingerprint": fingerprint, "sha256": scales.sha256,
        "layers": json.dumps(scales.layer_of),
    }  # fmt: skip
    specs = [Spec(name, DTYPES["F32"], array.shape) for name, array in content.items()]
    with Writer(out, specs, metadata) as writer:
        for name, array in content.items():
            writer.write(name, np.ascontiguousarray(array))
        writer.finish()


def read_overlay(path: str | Path) -> CacheScales | None:
    """An overlay; None where the file is something else. InputError where its scales are not those it was written
    with."""
    if not Path(path).is_file():
        raise UsageError("no such file", got=path)
    with Reader(path) as reader:
        said = reader.metadata
        if said.get("format") != OVERLAY:
            return None
        layers = json.loads(said["layers"])
        scales = {
            attention: {
                which: np.array(reader.array(f"{attention}.{which}_scale")).reshape(-1) for which in SIDES
            }
            for attention in layers
        }
    found = CacheScales(
        said["kv"], said["stat"], said["model"], said["fingerprint"], said["kin"], scales, layers
    )
    if found.sha256 != said["sha256"]:
        raise InputError("the overlay is damaged: its scales are not those of its checksum", where=path)
    return found
