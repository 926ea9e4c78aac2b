"""From statistics to the scales that a checkpoint stores: of inputs, and of the KV cache.

    FP8 input             amax / 448                    NVFP4 input, outer level      amax / (6 · 448)
    keys and values       ``cache_scales``

Fused siblings read one input and get one scale; so do the experts of a layer, for the same projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.containers import containers
from narrowcast.containers.container import CacheSpelling, Container
from narrowcast.containers.spelling import Array
from narrowcast.errors import UsageError
from narrowcast.jobs.fingerprint import fingerprint
from narrowcast.jobs.stats import STARVED, Stats, check_stat, read
from narrowcast.model.fused import fused_groups
from narrowcast.model.modules import Module
from narrowcast.model.roles import Role
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import some
from narrowcast.tensors.presets import Preset
from narrowcast.tensors.scaling import outer_scale, under_rule
from narrowcast.tensors.schemes import Scheme

KV = {"kv8": "fp8", "kv8_head": "fp8_head", "kvnv4": "nvfp4"}  # a preset's suffix to the cache's scheme
_KEYS = ("k_proj", "qkv_proj", "c_attn", "query_key_value")
_LATENT = ("kv_b_proj", "kv_a_proj_with_mqa")


@dataclass
class Calibration:
    """Statistics and which of them scales are made from. ``kv`` is the scheme of the cache that presets ask for, and
    ``used`` whether any preset asked for anything."""

    stats: Stats
    stat: str = "amax"
    kv: str | None = None
    used: bool = False

    def ask(self, preset: Preset) -> None:
        """A preset that takes scales from here. UsageError where two presets want different caches."""
        self.used = True
        if preset.kv is None:
            return
        if self.kv not in (None, KV[preset.kv]):
            raise UsageError(
                "a model has one KV cache", got=f"{self.kv} and {KV[preset.kv]}", remedy="one suffix for all"
            )
        self.kv = KV[preset.kv]

    def input_scale(self, name: str, scheme: Scheme, where: object) -> Array:
        """The static scale of a linear's input as a multiplier, float32 [1]. UsageError where nothing was seen."""
        amax = self._inputs.get(name, 0.0)
        if not amax > 0:
            raise UsageError(
                f"the statistics have no input of {name}", where=where,
                got="only zeros, or no token that passed through it" if name in self._inputs else None,
                remedy=f"keep it (--ignore {name}), or calibrate with more text",
            )  # fmt: skip
        outer = under_rule(scheme, "amax") if len(scheme.scales) == 2 else scheme
        return outer_scale(np.full((1, 1), amax, np.float32), outer).reshape(1)

    @cached_property
    def _inputs(self) -> dict[str, float]:
        own = self.stats.input_amax(self.stat)
        return {name: max(own[one] for one in names) for names in fused_groups(own) for name in names}

    def notes(self) -> list[str]:
        """Experts that go by the others' range, as fallbacks."""
        return [
            f"{path}: experts {_numbers(few)} saw fewer than {STARVED} tokens and take the layer's input scale"
            for path, few in self.stats.starved.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """What a record says of it; without names of files, which belong to a machine."""
        texts = [
            {"sha256": text.sha256, "tokens": text.tokens, "context": text.context}
            for text in self.stats.texts
        ]
        return {"stat": self.stat, "dtype": self.stats.dtype, "texts": texts, "kv": self.kv}


def opened(file: str | Path | None, stat: str | None) -> Calibration | None:
    """Statistics from a file. UsageError for a statistic that does not exist, or one without a file."""
    if file is None:
        if stat is not None:
            raise UsageError("--stat chooses among statistics, and there are none", remedy="--stats FILE")
        return None
    check_stat(stat or "amax")
    return Calibration(read(file), stat or "amax")


def check_model(found: Calibration | None, checkpoint: Checkpoint, model: object) -> None:
    """UsageError where the statistics are of another checkpoint."""
    if found is not None:
        found.stats.refuse_other(fingerprint(checkpoint), model)


def refusal(preset: Preset) -> UsageError:
    """Why a preset that needs statistics cannot do without."""
    return UsageError(
        f"{preset.name} needs calibration statistics of activations, and there are none",
        remedy="`narrowcast calibrate MODEL -o stats.safetensors` makes them, `narrowcast quantize --stats "
        f"stats.safetensors` uses them; or use {preset.nearest}, the nearest preset without calibration",
    )  # fmt: skip


def _numbers(few: list[int]) -> str:
    return ", ".join(map(str, few[:8])) + (f" and {len(few) - 8} more" if len(few) > 8 else "")


def check_cache(container: Container, kv: str) -> CacheSpelling:
    """How a container spells such a cache's scales; UsageError where it cannot."""
    if container.cache is None or kv not in container.cache_schemes:
        able = [name for name in containers if kv in containers[name].cache_schemes]
        raise UsageError(
            f"{container.name} has no KV cache of the scheme {kv}",
            wanted=", ".join(container.cache_schemes) or "none at all",
            remedy=f"--container {' or '.join(able)}",
        )  # fmt: skip
    return container.cache


def attentions(modules: Iterable[Module], where: object) -> dict[str, Module]:
    """The attention layers of a model that cache keys, with the projection that makes them. UsageError for latent
    attention, whose cache holds something else, and where there are none."""
    found: dict[str, Module] = {}
    latent = []
    for module in modules:
        parent, _, leaf = module.name.rpartition(".")
        if module.role is Role.ATTENTION and leaf in _KEYS:
            found[parent] = module
        elif leaf in _LATENT:
            latent.append(module.name)
    if latent or not found:
        raise UsageError(
            "the KV cache of this model cannot be given scales", where=where,
            got=f"latent attention ({some(latent, 2)})" if latent else "no attention layer with keys",
            remedy="a preset without +kv8, and --kv-cache-dtype fp8_per_token_head or auto when it is served",
        )  # fmt: skip
    return found
