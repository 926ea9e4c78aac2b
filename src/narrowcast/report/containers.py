"""Which container holds what, and who loads it: the tables of docs/containers.md and of the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowcast.containers import containers
from narrowcast.containers.container import Container
from narrowcast.containers.gguf import NAME as GGUF
from narrowcast.errors import UsageError
from narrowcast.hardware.engines import readers
from narrowcast.numbers.formats import BF16
from narrowcast.tensors.presets import Preset, presets

LETTERS = {"vllm": "V", "sglang": "S", "tensorrt-llm": "T", "transformers": "H"}
LEGEND = (
    "V vLLM, S SGLang, T TensorRT-LLM, H transformers, from their loaders' sources; V+ and V- are what vLLM's CPU "
    "build did with a file of ours ([docs/engines.md](docs/engines.md)); none where no engine loads what can be "
    "written; - where there is no spelling."
)


def written() -> list[Container]:
    """The containers of quantized weights that can be written."""
    return [row for row in containers.values() if row.spelling is not None]


def engines_of(container: Container, preset: Preset) -> tuple[str, ...] | None:
    """Who loads a preset in a container; None where it has no spelling."""
    assert container.spelling is not None
    try:
        how = container.spelling(preset.linear, BF16)
    except UsageError:
        return None
    return readers(container.name, preset.linear, format=how.format)


def measured(results: Path) -> dict[str, bool]:
    """``container/preset`` to whether vLLM's CPU build loaded it, on any of the instruction sets that were tried."""
    if not results.is_file():
        return {}
    found: dict[str, bool] = {}
    content: dict[str, Any] = json.loads(results.read_text())
    for result in content.values():
        for name, verdict in result["files"].items():
            found[name] = found.get(name, False) or bool(verdict["loads"])
    return found


def preset_rows(results: Path) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table preset × container × engine."""
    columns, tried = written(), measured(results)
    rows = []
    for preset in presets.values():
        cells = []
        for container in columns:
            engines = engines_of(container, preset)
            verdict = tried.get(f"{container.name}/{preset.name}")
            cells.append("-" if engines is None else _cell(engines, verdict))
        rows.append([preset.name, *cells])
    return ["preset", *(container.name for container in columns)], rows


def _cell(engines: tuple[str, ...], verdict: bool | None) -> str:
    letters = [letter for name, letter in LETTERS.items() if name in engines]
    if verdict is not None:
        sign = "V+" if verdict else "V-"
        letters = [sign, *(letter for letter in letters if letter != "V")]
    return " ".join(letters) or "none"


def container_rows() -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of containers."""
    rows = []
    for row in containers.values():
        spelled = [
            name for name, preset in presets.items() if row.spelling and engines_of(row, preset) is not None
        ]
        use = "read, write" if row.document is not None or row.name == GGUF else "read"
        holds = ", ".join(spelled) if row.spelling else "-"
        rows.append([f"`{row.name}`", row.title, use, holds, ", ".join(row.cache_schemes) or "-"])
    return ["--to", "what it is", "here", "presets it can hold", "KV cache"], rows
