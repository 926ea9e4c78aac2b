"""The machine's own accelerators, as its drivers tell; without one, its processor with the bandwidth measured.

    nvidia-smi, amd-smi, rocm-smi, in this order; the first that lists a GPU decides

A card that has a row is that row with the memory that the driver reports. A card that has none keeps what the driver
says, name, memory and architecture: its bandwidth and peaks are unknown, and a note says how to give them. What a tool
answers instead of GPUs is a note on the processor's row, so that a broken driver is not taken for a machine without
GPUs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from narrowcast.hardware.gpu import GPU, NATIVE, Source, capability_of
from narrowcast.hardware.gpus import gpus
from narrowcast.hardware.host import whole_memory

TIMEOUT = 20  # seconds; nvidia-smi takes several to wake cards that sleep
_MIB = 1 << 20
_NVIDIA = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
_OLDER = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
_AMD = ["amd-smi", "static", "--asic", "--vram", "--json"]
_ROCM = ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"]


@dataclass(frozen=True)
class Card:
    """What a driver says of one GPU: memory in bytes, the architecture as compilers call it."""

    name: str
    vendor: str
    memory: float | None
    arch: str | None


def here() -> GPU:
    """The machine's first GPU, else its processor, whose bandwidth takes about a second to measure."""
    return detected()[0]


def detected() -> tuple[GPU, ...]:
    """All GPUs of the machine in the driver's order; its processor alone where there is none."""
    said: list[str] = []
    return cards(said) or (_processor(said),)


def cards(said: list[str]) -> tuple[GPU, ...]:
    """The GPUs alone, which takes no measurement; what a tool answered instead of GPUs is added to ``said``."""
    for command, read in ((_NVIDIA, read_nvidia), (_AMD, read_amd), (_ROCM, read_rocm)):
        output = _run(command, said)
        if output is None and command is _NVIDIA and "compute_cap" in " ".join(said):
            said.clear()
            output = _run(_OLDER, said)  # drivers before 2021
        cards = read(output) if output is not None else ()
        if cards:
            return tuple(_row(card, command[0]) for card in cards)
        if output is not None:
            said.append(f"{command[0]} lists no GPU{_quoted(output)}")
    return ()


def _run(command: list[str], said: list[str]) -> str | None:
    """What a tool prints; None where it is not there, and where it fails, which is ``said``."""
    if shutil.which(command[0]) is None:
        return None
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, errors="replace", check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said.append(f"{command[0]} could not be asked: {error}")
        return None
    if ran.returncode != 0:
        said.append(f"{command[0]} failed with {ran.returncode}{_quoted(ran.stdout or ran.stderr)}")
        return None
    return ran.stdout


def _quoted(output: str) -> str:
    words = " ".join(output.split())
    return f": {words[:200]}" if words else ""


def read_nvidia(output: str) -> tuple[Card, ...]:
    """Lines of ``name, MiB, capability``. Memory that is the CPU's too is ``[N/A]``."""
    cards = []
    for line in output.splitlines():
        name, *rest = (part.strip() for part in line.split(","))
        if not rest:
            continue
        memory = float(rest[0]) * _MIB if re.fullmatch(r"\d+", rest[0]) else None
        capability = re.fullmatch(r"(\d+)\.(\d)", rest[1]) if len(rest) > 1 else None
        arch = f"sm{capability[1]}{capability[2]}" if capability else None
        cards.append(Card(name, "nvidia", memory, arch))
    return tuple(cards)


def read_amd(output: str) -> tuple[Card, ...]:
    """amd-smi's JSON: a list, in newer versions below ``gpu_data``; its MB are MiB."""
    content = _json(output)
    listed = content.get("gpu_data", []) if isinstance(content, dict) else content
    cards = []
    for entry in listed if isinstance(listed, list) else []:
        asic, vram = _part(entry, "asic"), _part(entry, "vram")
        size = vram.get("size")
        found = re.match(r"\d+", str(size.get("value") if isinstance(size, dict) else size))
        cards.append(
            Card(
                str(asic.get("market_name", "AMD GPU")), "amd", float(found[0]) * _MIB if found else None,
                _gfx(asic.get("target_graphics_version")),
            )
        )  # fmt: skip
    return tuple(cards)


def read_rocm(output: str) -> tuple[Card, ...]:
    """rocm-smi's JSON: ``card0`` and so on, whose keys differ in case from version to version."""
    content = _json(output)
    cards = []
    for key, entry in content.items() if isinstance(content, dict) else ():
        if re.fullmatch(r"card\d+", key) and isinstance(entry, dict):
            facts = {name.lower(): str(value) for name, value in entry.items()}
            size = facts.get("vram total memory (b)", "")
            name = next(
                (facts[x] for x in ("card series", "card model") if facts.get(x, "N/A") != "N/A"), "AMD GPU"
            )
            cards.append(
                Card(name, "amd", float(size) if size.isdecimal() else None, _gfx(facts.get("gfx version")))
            )
    return tuple(cards)


def _json(output: str) -> Any:
    """The JSON in an output that may begin with warnings; an empty dict where there is none."""
    start = re.search(r"[\[{]", output)
    try:
        return json.loads(output[start.start() :]) if start else {}
    except json.JSONDecodeError:
        return {}


def _part(entry: Any, name: str) -> dict[str, Any]:
    part = entry.get(name) if isinstance(entry, dict) else None
    return part if isinstance(part, dict) else {}


def _gfx(text: Any) -> str | None:
    found = re.search(r"gfx[0-9a-f]+", str(text).lower())
    return found[0] if found else None


def _row(card: Card, tool: str) -> GPU:
    told = Source(f"{tool} on this machine", date.today().isoformat())
    if card.name in gpus and (card.arch is None or gpus[card.name].arch in (None, card.arch)):
        row = gpus[card.name]
        if card.memory is None:
            return row
        return replace(
            row, memory_gb=card.memory / 1e9, seen_gib=None, sources={**row.sources, "memory": told}
        )
    note = (
        f"no row has the name {card.name}: bandwidth and peaks are not known; a file of your own rows gives them "
        "(docs/gpus.md)"
    )
    return GPU(
        card.name.lower(), (), card.vendor, card.arch, capability_of(card.arch),
        None if card.memory is None else card.memory / 1e9, None, NATIVE.get(card.arch or "", frozenset()), told,
        notes={note: frozenset()},
    )  # fmt: skip


def _processor(said: list[str]) -> GPU:
    """The row of the processor with this machine's memory, bandwidth and instructions."""
    from narrowcast.hardware.bandwidth import measure

    told = Source("this machine", date.today().isoformat())
    found = measure()
    memory = whole_memory()
    model, flags = processor()
    formats = {
        "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
        "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"},
    }
    notes = [
        model,
        f"bandwidth measured by {found.threads} threads over {found.footprint / 1e9:.2f} GB, the fastest of "
        f"{found.passes} passes: {found.read / 1e9:.1f} GB/s reading, {found.copy / 1e9:.1f} copying, read and "
        f"written bytes counted; the median pass {found.usual / 1e9:.1f}",
        *said,
    ]
    return replace(
        gpus["cpu"], memory_gb=None if memory is None else memory / 1e9, bandwidth_tb_s=found.best / 1e12,
        formats=frozenset(name for name, needed in formats.items() if needed & flags), source=told,
        notes={note: frozenset() for note in notes if note},
    )  # fmt: skip


def processor(file: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """The processor's name and the flags of its instructions; nothing where Linux tells nothing."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return "", frozenset()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (model[1].strip() if model else ""), frozenset(flags[1].split() if flags else ())
