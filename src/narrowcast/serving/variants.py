"""An unquantized model as presets would write it, each in the container that the engine reads best.

    asked for      that container
    not asked for  compressed-tensors where the engine runs it there, else the first other that it runs, else the
                   first that can hold it at all, whose refusal is then the answer

The model is read once, whatever the number of presets. Left out: containers that narrowcast does not write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.engines import paths
from narrowcast.hardware.gpus import GPU
from narrowcast.model.geometry import Matrix
from narrowcast.model.modules import Module
from narrowcast.numbers.formats import formats
from narrowcast.serving.loading import CONTAINER, load
from narrowcast.serving.served import Served
from narrowcast.serving.settling import config_of
from narrowcast.serving.written import Writing, representatives
from narrowcast.tensors.presets import LinearScheme, Preset, presets


@dataclass(frozen=True)
class Variants:
    """A model, and who shall serve it. ``container`` None: not asked for."""

    model: str | Path
    wide: Served
    engine: str
    gpu: GPU
    container: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether it is already, or lies in a container of its own, so that no preset can be chosen."""
        return self.wide.container != "plain" or self.wide.quantized

    def written(self, name: str) -> Served:
        """The model as a preset would write it. UsageError for one that no container, or not the asked one, holds."""
        preset, error = presets[name], None
        for container in [self.container] if self.container is not None else self._order(preset):
            try:
                return self._in(preset, container)
            except UsageError as problem:
                error = error or problem
        raise error or UsageError(
            f"no container that is written holds {name}", remedy="`narrowcast presets` lists them"
        )

    def _order(self, preset: Preset) -> Iterator[str]:
        """Containers that can spell the preset, those first in which the engine runs it."""
        spelled = {
            name: word for name in (CONTAINER, *containers) if (word := self._word(name, preset)) is not None
        }
        runs = [
            name for name, word in spelled.items() if self._path_refusal(name, preset.linear, word) is None
        ]
        yield from dict.fromkeys((*runs, *spelled))

    def _word(self, name: str, preset: Preset) -> str | None:
        """The container's own word for the preset's layers, None where it has none."""
        row = containers[name]
        if row.spelling is None or row.name == "plain":
            return None
        try:
            return str(row.spelling(preset.linear, formats[self.wide.geometry.dtype]).format)
        except UsageError:
            return None

    def _path_refusal(self, container: str, linear: LinearScheme, word: str) -> str | None:
        return paths(self.engine, container, linear, self.gpu, format=word).refusal

    def _in(self, preset: Preset, container: str) -> Served:
        if not self._config:
            return load(self.model, preset=preset.name, container=container)
        wide = self.wide
        writing = Writing(preset, container, self._config)
        groups = writing.applied(wide.groups, self._seen)
        cache = CACHE_MODES[preset.kv].name if preset.kv is not None else None
        return replace(
            wide, container=writing.container.name, groups=groups, preset=preset.name, kv=cache,
            kv_scales=cache is not None, notes=(*wide.notes, *writing.notes),
        )  # fmt: skip

    @cached_property
    def _config(self) -> dict[str, Any]:
        return dict(config_of(self.wide))

    @cached_property
    def _seen(self) -> list[Module]:
        matrices: list[Matrix] = [group.matrix for group in self.wide.groups]
        return representatives(matrices, self._config)
