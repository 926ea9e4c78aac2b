"""Accelerators: names as people and drivers write them, and the facts of the published tables."""

from __future__ import annotations

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.gpus import gpus

NAMES = [
    ("h100", "h100"),
    ("H100 SXM", "h100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100 pcie"),
    ("NVIDIA H100 NVL", "h100 nvl"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("l4", "l4"),
    ("NVIDIA L40S", "l40s"),
    ("mi300x", "mi300x"),
    ("AMD Instinct MI300X OAM", "mi300x"),
    ("4090", "rtx 4090"),
    ("NVIDIA GeForce RTX 4090", "rtx 4090"),
    ("RTX_5090", "rtx 5090"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx pro 6000"),
    ("Tesla T4", "t4"),
    ("DGX Spark", "gb10"),
    ("NVIDIA GB10", "gb10"),
    ("CPU", "cpu"),
    ("x86_64", "cpu"),
]


@pytest.mark.parametrize(("spelled", "name"), NAMES)
def test_forgives_spelling(spelled: str, name: str) -> None:
    assert gpus[spelled].name == name
    assert spelled in gpus


@pytest.mark.parametrize(
    ("spelled", "near"),
    [
        ("h10", "h100"),
        ("rtx 4091", "rtx 4090"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx 4090"),
    ],
)
def test_another_board_is_unknown_and_its_neighbours_are_named(spelled: str, near: str) -> None:
    """A board of another size or kind has other numbers, so it is not taken for the one that sounds alike."""
    assert spelled not in gpus
    with pytest.raises(UsageError) as caught:
        gpus[spelled]
    assert caught.value.remedy is not None
    assert near in caught.value.remedy
    assert caught.value.exit_code == 2


def test_facts() -> None:
    """Capability, memory and bandwidth of the published table, and the formats that decide."""
    assert (gpus["h100"].capability, gpus["h100"].memory_gb, gpus["h100"].bandwidth_tb_s) == (
        (9, 0),
        80,
        3.35,
    )
    assert (gpus["a100"].sm, gpus["a100"].bandwidth_tb_s) == (80, 2.04)
    assert (gpus["l4"].sm, gpus["l4"].bandwidth_tb_s, gpus["rtx 5090"].sm, gpus["gb300"].sm) == (
        89,
        0.30,
        120,
        103,
    )
    assert gpus["cpu"].capability is None
    assert gpus["cpu"].bandwidth_tb_s is None
    fp8 = {row.name for row in gpus.values() if row.formats & {"e4m3fn", "e4m3fnuz", "e4m3_ieee"}}
    assert not fp8 & {"v100", "t4", "a100", "a10", "rtx 3090", "orin agx", "mi250x", "tpu v5e", "tpu v6e"}
    assert {row.name for row in gpus.values() if "e4m3fnuz" in row.formats} == {"mi300x", "mi325x"}
    assert {row.name for row in gpus.values() if "nvfp4" in row.formats} == {
        "b100", "b200", "gb200", "b300", "gb300", "rtx 5090", "rtx pro 6000", "gb10", "rubin",
    }  # fmt: skip
    assert {row.name for row in gpus.values() if "mxfp4" in row.formats and row.vendor == "amd"} == {
        "mi350x", "mi355x", "mi455x",
    }  # fmt: skip
    assert {row.name for row in gpus.values() if any("0.15 POPS" in note for note in row.notes)} == {
        "b300",
        "gb300",
    }


def test_rows_are_whole() -> None:
    """Names lead back to their rows, capability and architecture agree, every row has a source and a date."""
    for name, row in gpus.items():
        assert gpus[name] is row
        assert all(gpus[alias] is row for alias in row.aliases)
        assert row.source
        assert row.date
        assert (row.capability is None) or row.arch == f"sm{row.sm}"
