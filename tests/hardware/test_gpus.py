"""Accelerators: names as people and drivers write them, the facts of the published tables, ridge points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.cost import ridge
from narrowcast.hardware.gpu import COLUMNS, SUBJECTS
from narrowcast.hardware.gpus import FNUZ, INT8_SLOW, gpus

NAMES = [
    ("h100", "h100"),
    ("H100 SXM", "h100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100 pcie"),
    ("NVIDIA H100 NVL", "h100 nvl"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", "h200 nvl"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA GH200 144G HBM3e", "gh200 141gb"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100-SXM4-40GB", "a100 40gb"),
    ("NVIDIA A100 80GB PCIe", "a100 pcie"),
    ("NVIDIA A100-PCIE-40GB", "a100 pcie 40gb"),
    ("Tesla V100-SXM2-16GB", "v100 16gb"),
    ("Tesla V100-SXM2-32GB", "v100"),
    ("Tesla V100-PCIE-32GB", "v100 pcie"),
    ("NVIDIA A10G", "a10g"),
    ("NVIDIA A10", "a10"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("l4", "l4"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA L40", "l40"),
    ("mi300x", "mi300x"),
    ("AMD Instinct MI300X OAM", "mi300x"),
    ("AMD Instinct MI300X VF", "mi300x"),
    ("4090", "rtx 4090"),
    ("NVIDIA GeForce RTX 4090", "rtx 4090"),
    ("RTX_5090", "rtx 5090"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"),
    ("NVIDIA RTX A6000", "rtx a6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx pro 6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx pro 6000 server"),
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
        ("Tesla V100-PCIE-16GB", "v100 pcie"),
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


# Name, capability, GB, TB/s, and dense peaks in the order fp32 tf32 bf16 fp16 fp8 int8 fp6 fp4: the published table.
TABLE = """
v100         7.0 32    0.90  15.7  -     -     125   -     62    -     -
t4           7.5 16    0.32  8.1   -     -     65    -     130   -     -
a100         8.0 80    2.04  19.5  156   312   312   -     624   -     -
a10          8.6 24    0.60  31.2  62.5  125   125   -     250   -     -
rtx_a6000    8.6 48    0.768 38.7  77.4  154.8 154.8 -     309.7 -     -
rtx_3090     8.6 24    0.936 35.6  35.6  71    71    -     284   -     -
orin_agx     8.7 64    .2048 5.3   21    42    42    -     85    -     -
l4           8.9 24    0.30  30.3  60    121   121   242   242   -     -
l20          8.9 48    0.864 59.8  59.8  119.5 119.5 239   239   -     -
l40s         8.9 48    0.864 91.6  183   362   362   733   733   -     -
rtx_4090     8.9 24    1.008 82.6  82.6  165.2 165.2 330.3 660.6 -     -
h100         9.0 80    3.35  67    494.5 989   989   1979  1979  -     -
h100_pcie    9.0 80    2.0   51    378   756   756   1513  1513  -     -
h100_nvl     9.0 94    3.9   60    418   835   835   1671  1671  -     -
h200         9.0 141   4.8   67    494.5 989   989   1979  1979  -     -
gh200        9.0 96    4.0   67    494.5 989   989   1979  1979  -     -
gh200_141gb  9.0 141   4.8   67    494.5 989   989   1979  1979  -     -
h20          9.0 96    4.0   44    74    148   148   296   296   -     -
b100        10.0 192   8.0   60    875   1750  1750  3500  3500  3500  7000
b200        10.0 180   8.0   75    1125  2250  2250  4500  4500  4500  9000
gb200       10.0 186   8.0   80    1250  2500  2500  5000  5000  5000  10000
b300        10.3 288   8.0   75    1125  2250  2250  4500  150   4500  12600
gb300       10.3 279   8.0   80    1250  2500  2500  5000  165   5000  15000
rtx_5090    12.0 32    1.792 104.8 104.8 209.5 209.5 419   838   -     1676
gb10        12.1 128   0.273 31    31    62    62    124   248   -     496
rubin        -   288   22    130   2000  4000  4000  17500 2500  17500 35000
mi250x       -   128   3.28  47.9  -     383   383   -     383   -     -
mi300x       -   192   5.3   163.4 653.7 1307  1307  2615  2615  -     -
mi325x       -   256   6.0   163.4 653.7 1307  1307  2615  2615  -     -
mi350x       -   288   8.0   144   -     2300  2300  4600  4600  9200  9200
mi355x       -   288   8.0   157.3 -     2500  2500  5000  5000  10100 10100
mi455x       -   432   23.3  315   -     5000  5000  10000 5000  10000 20000
gaudi2       -   96    2.46  -     -     432   -     865   -     -     -
gaudi3       -   128   3.70  229   459   1677  459   1677  -     -     -
tpu_v5e      -   16    0.82  -     -     197   -     -     394   -     -
tpu_v5p      -   95    2.76  -     -     459   -     -     918   -     -
tpu_v6e      -   32    1.64  -     -     918   -     918   1836  -     -
tpu_v7x      -   192   7.37  -     -     2307  -     4614  -     -     -
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_published_table(line: str) -> None:
    name, capability, memory, bandwidth, *peaks = line.split()
    row = gpus[name.replace("_", " ")]
    assert row.capability == (None if capability == "-" else tuple(map(int, capability.split("."))))
    assert (row.memory, row.bandwidth) == (
        pytest.approx(float(memory) * 1e9),
        pytest.approx(float(bandwidth) * 1e12),
    )
    for column, said in zip(COLUMNS, peaks, strict=False):
        assert row.peaks.get(column) == (None if said == "-" else float(said)), column
        assert row.peak(column) == (None if said == "-" else pytest.approx(float(said) * 1e12))


# FLOP per byte as published, each within the last digit printed.
RIDGES = [
    ("h100", "bf16", 295), ("h100", "fp8", 591),
    ("a100", "bf16", 153), ("a100", "int8", 306), ("h200", "bf16", 206), ("h200", "fp8", 412),
    ("h20", "bf16", 37), ("h20", "fp8", 74), ("l40s", "bf16", 419), ("l40s", "fp8", 848), ("l4", "bf16", 403),
    ("rtx 4090", "bf16", 164), ("mi300x", "fp8", 493), ("mi355x", "fp4", 1262), ("mi355x", "fp8", 625),
    ("rtx 5090", "fp4", 935), ("gb10", "fp4", 1817), ("tpu v5e", "bf16", 240), ("tpu v5e", "int8", 480),
    ("tpu v7x", "fp8", 626), ("b200", "bf16", 281), ("b200", "fp8", 563), ("b200", "fp4", 1125),
    ("tpu v6e", "bf16", 560), ("tpu v6e", "int8", 1120),
]  # fmt: skip


@pytest.mark.parametrize(("name", "column", "published"), RIDGES)
def test_ridge_points(name: str, column: str, published: float) -> None:
    """Seeds row 46 and the list of the published table."""
    assert ridge(gpus[name], column) == pytest.approx(published, abs=1)


def test_an_engines_arithmetic_leads_to_a_ridge() -> None:
    assert ridge(gpus["h100"], "bf16: weight only") == ridge(gpus["h100"], "bf16")
    assert ridge(gpus["b200"], "nvfp4") == ridge(gpus["b200"], "fp4")
    assert ridge(gpus["a100"], "fp8") is None
    assert ridge(gpus["cpu"], "bf16") is None


# Shares of the dense peak that large products reached, as published, in percent.
@pytest.mark.parametrize(
    ("name", "column", "share"),
    [
        ("a100", "bf16", 86.9), ("a100 pcie", "bf16", 81.1), ("h100", "bf16", 80.3), ("h100", "fp8", 70.9),
        ("h200", "fp8", 73), ("gh200 141gb", "bf16", 83.6), ("gh200 141gb", "fp8", 77.6), ("b200", "bf16", 78),
        ("b200", "fp8", 76), ("mi300x", "bf16", 51.4), ("gaudi2", "bf16", 97), ("gaudi2", "fp8", 96),
    ],
)  # fmt: skip
def test_achieved_shares(name: str, column: str, share: float) -> None:
    """Shares are printed to a per cent or a tenth, measurements to a TFLOPS or a tenth; the MI300X's is a share of
    1300, not of its sheet's 1307."""
    achievable, peak = gpus[name].achievable(column), gpus[name].peak(column)
    assert achievable is not None
    assert peak is not None
    assert 100 * achievable / peak == pytest.approx(share, abs=0.5 + 100 * 0.5e12 / peak)


def test_nothing_was_reached_above_the_peak() -> None:
    for row in gpus.values():
        assert all(tera <= row.peaks[column] for column, tera in row.achieved.items()), row.name


def test_facts() -> None:
    """Formats that decide."""
    assert gpus["cpu"].capability is None
    assert gpus["cpu"].bandwidth is None
    fp8 = {row.name for row in gpus.values() if row.fp8_kind is not None}
    assert not fp8 & {"v100", "t4", "a100", "a10", "rtx 3090", "orin agx", "mi250x", "tpu v5e", "tpu v6e"}
    assert {row.name for row in gpus.values() if row.fp8_kind == "fnuz"} == {"mi300a", "mi300x", "mi325x"}
    assert gpus["gaudi2"].fp8_kind == "ieee"
    assert {row.name for row in gpus.values() if "nvfp4" in row.formats} == {
        "b100", "b200", "gb200", "b300", "gb300", "rtx 5080", "rtx 5090", "rtx pro 6000", "rtx pro 6000 server",
        "gb10", "rubin",
    }  # fmt: skip
    assert {row.name for row in gpus.values() if "mxfp4" in row.formats and row.vendor == "amd"} == {
        "mi350x", "mi355x", "mi455x",
    }  # fmt: skip
    assert gpus["a100"].multiplies("int4")
    assert not gpus["h100"].multiplies("int4")
    assert not gpus["a100"].multiplies("fp8")


def test_traps_print_where_they_apply() -> None:
    def about(name: str, *subjects: str) -> str:
        return " ".join(gpus[name].notes_about(*subjects))

    for name in ("b300", "gb300"):
        assert INT8_SLOW in gpus[name].notes_about("int8")
        assert "0.15 POPS" not in about(name, "fp4", "bf16", "fp8", "memory")
    assert not any(INT8_SLOW in row.notes for row in gpus.values() if row.sm != 103)
    assert {row.name for row in gpus.values() if FNUZ in row.notes_about("fp8")} == {
        "mi300a",
        "mi300x",
        "mi325x",
    }
    for name, full in (
        ("rtx 3090", "142"),
        ("rtx 4090", "660.6"),
        ("rtx 5090", "838"),
        ("rtx 5080", "450.2"),
    ):
        assert "half rate when they accumulate in FP32" in about(name, "fp16")
        assert full in about(name, "fp16")
        assert "half rate" not in about(name, "int8", "memory")
    assert "half of the operands zero" in about("h100", "fp8")
    assert "half of the operands zero" not in about("h100", "memory")
    assert "rate of BF16" in about("tpu v6e", "fp8")
    assert "96 and with 141" in about("gh200", "memory")
    assert "141 GB" in about("h20", "memory")
    assert "the CPU's too" in about("gb10", "memory")
    assert "announced" in about("rubin", "int8")  # about the whole card


def test_rows_are_whole() -> None:
    """Names lead back to their rows, capability and architecture agree, every number has a source and a date, and a
    peak is of something that the units take, or a note says why."""
    names = [name for row in gpus.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    for name, row in gpus.items():
        assert gpus[name] is row
        assert all(gpus[alias] is row for alias in row.aliases)
        assert (row.capability is None) or row.arch == f"sm{row.sm}"
        for subject in SUBJECTS:
            source = row.source_of(subject)
            assert source.words
            assert source.date[:2] == "20"
            assert len(source.date) == 10
        assert all(row.multiplies(column) or row.notes_about(column) for column in row.peaks), name
        assert ("achieved" in row.sources) == bool(row.achieved)
        assert all(about <= set(SUBJECTS) for about in row.notes.values())


@pytest.mark.parametrize(
    ("name", "gib", "shown"),
    [
        # what PyTorch sees, as vLLM's start-up logs print it, and up to 2 % less than the driver shows
        ("h100", 79.19, False),  # llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0
        ("l4", 22.05, False),  # pytorch/pytorch#175666
        ("rtx 3090", 23.58, False),  # vllm-project/vllm#10517
        ("rtx 4090", 23.08 / 0.98, False),  # vllm-project/vllm#13061, at a utilisation of 0.98
        ("rtx 5090", 31.4, False),  # noonghunna/club-3090#1087
        ("b200", 178.36, False),  # vllm-project/vllm#21489
        ("gb10", 121.69, False),  # MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#47
        # what nvidia-smi shows
        ("a40", 46068 / 1024, True),  # guqiong96/Lvllm#35
        ("h200", 143771 / 1024, True),  # vllm-project/recipes#381
        ("rtx pro 6000", 97887 / 1024, True),  # vllm-project/vllm#37751
        ("b300", 275040 / 1024, True),  # the row's note
    ],
)
def test_programs_see_another_size_than_is_printed_on_the_box(name: str, gib: float, shown: bool) -> None:
    usable = gpus[name].usable
    assert usable is not None
    ratio = usable / 2**30 / gib
    assert 0.99 <= ratio <= 1.0005 if shown else 0.999 <= ratio < 1.021


def test_memory_that_is_known_exactly_stays() -> None:
    row = gpus["h100"]
    assert replace(row, memory_gb=None).usable is None
    assert replace(row, memory_gb=85.0, seen_gib=None).usable == 85e9
    assert gpus["cpu"].usable is None


def test_bounds_take_what_is_faster_than_the_peak() -> None:
    """cuBLASLt reaches 773 TFLOPS in FP8 on an RTX 5090, torch 236 in BF16; no bound may be slower than that."""
    row = gpus["rtx 5090"]
    assert row.peak("fp8") == 419e12
    assert (row.fastest("fp8") or 0) > 773e12
    assert row.fastest("bf16") == 236e12
    assert gpus["h100"].fastest("bf16") == gpus["h100"].peak("bf16")
    assert gpus["t4"].fastest("fp8") is None
