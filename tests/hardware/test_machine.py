"""The machine's own accelerators: real output of the drivers' tools, read and through executables on PATH; and the
processor's bandwidth, whatever it is, within what must hold."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import date
from itertools import accumulate, chain, cycle
from pathlib import Path

import pytest

from narrowcast.hardware import bandwidth, machine
from narrowcast.hardware.bandwidth import footprint_of, last_cache, measure
from narrowcast.hardware.gpus import gpus
from narrowcast.hardware.host import free_memory, whole_memory
from narrowcast.hardware.machine import Card, detected, here, read_amd, read_nvidia, read_rocm
from narrowcast.hardware.own_gpus import named

MIB = 1 << 20
H100S = "NVIDIA H100 80GB HBM3, 81559, 9.0\n" * 8
SPARK = "NVIDIA GB10, [N/A], 12.1\n"
UNKNOWN = "NVIDIA GeForce RTX 4060 Laptop GPU, 8188, 8.9\n"
NONE = "No devices were found\n"
BROKEN = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)
# amd-smi static --asic --vram --json of ROCm 7, shortened; versions before wrote the list alone.
AMD = {
    "gpu_data": [
        {
            "gpu": 0,
            "asic": {
                "market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "device_id": "0x74a1",
                "num_compute_units": 304, "target_graphics_version": "gfx942",
            },
            "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
        }
    ]
}  # fmt: skip
ROCM = (
    '{"card0": {"Card Series": "AMD Instinct MI300X", "GFX Version": "gfx942", "VRAM Total Memory (B)": '
    '"206141652992", "VRAM Total Used Memory (B)": "301989888"}, "card1": {"Card series": "Radeon RX 7900 XTX", '
    '"GFX Version": "gfx1100", "VRAM Total Memory (B)": "25753026560"}, "system": {"Driver version": "6.10.5"}}'
)
LOW_POWER = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"


def test_reads_nvidia_smi() -> None:
    assert read_nvidia(H100S) == (Card("NVIDIA H100 80GB HBM3", "nvidia", 81559 * MIB, "sm90"),) * 8
    assert read_nvidia(SPARK) == (Card("NVIDIA GB10", "nvidia", None, "sm121"),)
    assert read_nvidia("Tesla T4, 15360\n") == (Card("Tesla T4", "nvidia", 15360 * MIB, None),)
    assert read_nvidia(NONE) == ()
    assert read_nvidia("") == ()


def test_reads_amd_smi_and_rocm_smi() -> None:
    one = Card("AMD Instinct MI300X", "amd", 196592 * MIB, "gfx942")
    assert read_amd(json.dumps(AMD)) == (one,)
    assert read_amd(json.dumps(AMD["gpu_data"])) == (one,)
    assert read_amd('[{"asic": {"market_name": "x"}, "vram": {"size": "16 MB"}}]') == (
        Card("x", "amd", 16 * MIB, None),
    )
    other = Card("Radeon RX 7900 XTX", "amd", 25753026560, "gfx1100")
    assert read_rocm(LOW_POWER + ROCM) == (replace(one, memory=206141652992), other)
    for junk in ("", "not json", "[]", "{}", "null", "{", '{"card0": 3}', '[3, {"asic": null}]'):
        assert read_rocm(junk) == ()
        assert all(card.memory is None for card in read_amd(junk))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which only what a test writes is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def tool(folder: Path, name: str, text: str, code: int = 0, only: str = "") -> None:
    """An executable that prints ``text``, for arguments with ``only`` in them; refuses others as the driver does."""
    answer = folder / f"{name}.txt"
    answer.write_text(text)
    error = 'echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2'
    refuse = f'case "$*" in *{only}*) ;; *) {error} ;; esac\n'
    lines = f'while IFS= read -r line || [ -n "$line" ]; do printf "%s\\n" "$line"; done < {answer}\n'
    (folder / name).write_text(f"#!/bin/sh\n{refuse if only else ''}{lines}exit {code}\n")
    (folder / name).chmod(0o755)


def test_eight_of_a_kind(tools: Path) -> None:
    tool(tools, "nvidia-smi", H100S)
    found = detected()
    assert len(found) == 8
    assert len(set(found)) == 1
    row = here()
    assert row == found[0]
    assert row.name == "h100"
    assert row.memory == pytest.approx(81559 * MIB)
    assert row.source_of("memory") == ("nvidia-smi on this machine", date.today().isoformat())
    assert (row.peaks, row.bandwidth) == (gpus["h100"].peaks, gpus["h100"].bandwidth)
    assert row.source_of("bandwidth") == gpus["h100"].source


def test_memory_that_is_the_cpus_keeps_the_rows(tools: Path) -> None:
    tool(tools, "nvidia-smi", SPARK)
    assert here() is gpus["gb10"]


def test_a_card_without_a_row_keeps_what_the_driver_says(tools: Path) -> None:
    tool(tools, "nvidia-smi", UNKNOWN)
    row = here()
    assert (row.name, row.capability, row.vendor) == ("nvidia geforce rtx 4060 laptop gpu", (8, 9), "nvidia")
    assert row.memory == 8188 * MIB
    assert row.formats == gpus["l4"].formats
    assert row.bandwidth is None
    assert not row.peaks
    assert any("no row has the name NVIDIA GeForce RTX 4060 Laptop GPU" in note for note in row.notes_about())


def test_a_name_that_disagrees_with_its_architecture_is_not_taken(tools: Path) -> None:
    tool(tools, "nvidia-smi", "NVIDIA H100, 81559, 8.0\n")
    assert here().peaks == {}
    assert here().arch == "sm80"


def test_an_old_driver_is_asked_again(tools: Path) -> None:
    tool(tools, "nvidia-smi", "Tesla V100-SXM2-16GB, 16160\n", only="name,memory.total\\ ")
    assert here().name == "v100 16gb"


def test_amd(tools: Path) -> None:
    tool(tools, "rocm-smi", LOW_POWER + ROCM)
    assert [row.name for row in detected()] == ["mi300x", "radeon rx 7900 xtx"]
    assert detected()[1].formats == frozenset()
    tool(tools, "amd-smi", json.dumps(AMD))
    assert [row.name for row in detected()] == ["mi300x"]
    assert here().source_of("memory").words == "amd-smi on this machine"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth over arrays that need no second to fill."""
    monkeypatch.setattr("narrowcast.hardware.bandwidth.measure", lambda: measure(0.01, 1, 8 << 20))


@pytest.mark.usefixtures("quick")
def test_the_processor_with_what_a_broken_driver_said(tools: Path) -> None:
    tool(tools, "nvidia-smi", BROKEN, 9)
    row = named("HERE")
    assert row.name == "cpu"
    assert any("nvidia-smi failed with 9: NVIDIA-SMI has failed" in note for note in row.notes_about())
    tool(tools, "nvidia-smi", NONE)
    assert any("nvidia-smi lists no GPU: No devices" in note for note in here().notes_about())


@pytest.mark.usefixtures("quick", "tools")
def test_the_processor() -> None:
    row = here()
    assert (row.name, row.arch, row.vendor) == ("cpu", "cpu", "cpu")
    assert row.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert row.bandwidth is not None
    assert row.bandwidth > 0
    assert row.source_of("bandwidth") == ("this machine", date.today().isoformat())
    assert any("bandwidth measured by 1 threads" in note for note in row.notes)
    assert len(detected()) == 1


def test_instructions_of_a_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512_bf16 avx512_vnni\n"
    )
    assert machine.processor(file) == ("Some CPU @ 2 GHz", {"fpu", "avx2", "avx512_bf16", "avx512_vnni"})
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n")
    assert machine.processor(file) == ("", {"fp", "asimd", "bf16", "i8mm"})
    assert machine.processor(tmp_path / "none") == ("", frozenset())


def test_bandwidth_is_what_the_bytes_took() -> None:
    """Two bytes are moved for one that is copied; the footprint is that of both arrays, in whole words per thread."""
    found = measure(0.02, 2, 6_000_004)
    assert found.footprint == 2 * (6_000_004 // 2 // 4 // 2) * 4 * 2
    assert found.threads == 2
    assert found.passes >= 3
    assert found.best == max(found.read, found.copy) >= found.usual
    assert 1e8 < found.best < 1e14


def test_a_copied_byte_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which passes take a second and every third half a second."""
    lengths = cycle((1.0, 1.0, 0.5))
    ticks = accumulate(chain.from_iterable((1.0, next(lengths)) for _ in range(100)))
    monkeypatch.setattr("narrowcast.hardware.bandwidth.time.perf_counter", lambda: next(ticks))
    found = measure(5.0, 1, 8000)
    assert (found.read, found.copy, found.usual) == (4000 / 0.5, 8000 / 0.5, 8000 / 1.0)
    assert found.passes == 3


def test_arrays_are_larger_than_the_cache_and_smaller_than_memory(tmp_path: Path) -> None:
    mib, gib = 1 << 20, 1 << 30
    assert footprint_of(0, None) == 256 * mib
    assert footprint_of(100 * mib, None) == 400 * mib
    assert footprint_of(4 * gib, None) == 2 * gib
    assert footprint_of(100 * mib, gib) == gib // 4
    for index, text in enumerate(("48K", "2048K", "300M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{text}\n")
    assert last_cache(tmp_path) == 300 * mib
    assert last_cache(tmp_path / "none") == 0
    assert (whole_memory(tmp_path), free_memory(tmp_path)) == (None, None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       24731708 kB\nMemAvailable:   23000000 kB\n")
    assert (whole_memory(tmp_path), free_memory(tmp_path)) == (24_731_708 * 1024, 23_000_000 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    assert (whole_memory(tmp_path), free_memory(tmp_path)) == (24_731_708 * 1024, 23_000_000 * 1024)
    (group / "memory.max").write_text("8000\n")
    assert (whole_memory(tmp_path), free_memory(tmp_path)) == (8000, 3000)
    (group / "memory.current").write_text("9000\n")
    assert free_memory(tmp_path) == 0


def test_measuring_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model larger than half of the memory does not make the measurement take all of it."""
    monkeypatch.setattr(bandwidth, "free_memory", lambda: 64 << 20)
    found = bandwidth.measure(0.01, 1, 1 << 28)
    assert found.footprint <= (64 << 20) // bandwidth.MEMORY_SHARE
