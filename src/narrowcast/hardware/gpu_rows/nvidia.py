"""NVIDIA's accelerators for servers, by generation."""

from __future__ import annotations

from narrowcast.hardware.gpu import GPU, NATIVE
from narrowcast.hardware.gpu_rows.sources import (
    BLACKWELL_BRIEF,
    BLACKWELL_SHEET,
    CLOCKS,
    COLLECTED,
    COLLECTED_SPECS,
    DATASHEETS,
    HMC,
    HMC_LATE,
    INT8_SLOW,
    L40_SHEET,
    NVLINK,
    RANGE,
    SHEET,
    SHEET_LATE,
    SPARSE,
    VOLTA_AMPERE,
)
from narrowcast.hardware.gpu_rows.writing import row

_DP4A = "INT8 on CUDA cores only (DP4A)"
_NO_BF16 = "no BF16"
_FP4_ULTRA = (
    "FP4 is given as 14000 TFLOPS by NVIDIA's Blackwell brief and as 12600 and 15000 by collections of datasheets; "
    "the least is taken"
)

ROWS: tuple[GPU, ...] = (
    row(
        "v100", "sm70", 32, 0.90, aliases=("v100 sxm2",), fp32=15.7, fp16=125, int8=62,
        source=VOLTA_AMPERE, sources={"int8": SHEET}, notes={_DP4A: "int8", _NO_BF16: "bf16"},
    ),
    row(
        "v100 16gb", "sm70", 16, 0.90, aliases=("v100 sxm2 16gb",), fp32=15.7, fp16=125, int8=62,
        source=VOLTA_AMPERE, sources={"int8": SHEET}, notes={_DP4A: "int8", _NO_BF16: "bf16"},
    ),
    row(
        "v100 pcie", "sm70", 32, 0.90, fp32=14.1, fp16=112,
        source=COLLECTED_SPECS, notes={_DP4A: "int8", _NO_BF16: "bf16"},
    ),
    row("t4", "sm75", 16, 0.32, checked=True, fp32=8.1, fp16=65, int8=130, int4=260, source=SHEET, notes={
        _NO_BF16: "bf16", "bandwidth is also given as 0.30 TB/s": "bandwidth",
    }),
    row(
        "a100", "sm80", 80, 2.04, aliases=("a100 sxm4",), achieved={"bf16": 271.2},
        fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624, int4=1248, sources={"int4": VOLTA_AMPERE},
    ),
    row(
        "a100 40gb", "sm80", 40, 1.555, aliases=("a100 sxm4 40gb",),
        fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624, int4=1248, source=VOLTA_AMPERE,
    ),
    row(
        "a100 pcie", "sm80", 80, 1.935, achieved={"bf16": 252.9},
        fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624, int4=1248,
        sources={"memory bandwidth": COLLECTED_SPECS, "int4": VOLTA_AMPERE},
    ),
    row(
        "a100 pcie 40gb", "sm80", 40, 1.555,
        fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624, int4=1248,
        source=COLLECTED_SPECS, sources={"int4": VOLTA_AMPERE},
    ),
    row(
        "a800", "sm80", 80, 2.04, aliases=("a800 sxm4",),
        fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624, int4=1248,
        source=HMC_LATE, sources={"bandwidth": SHEET}, notes={NVLINK: ""},
    ),
    row("a30", "sm80", 24, 0.933, fp32=10.3, tf32=82, bf16=165, fp16=165, int8=330, int4=661, source=SHEET_LATE),
    row("a10", "sm86", 24, 0.60, checked=True, fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250, int4=500,
        source=COLLECTED_SPECS),
    row(
        "a10g", "sm86", 24, 0.60, checked=True,
        fp32=35, tf32=35, bf16=70, fp16=70, int8=140, int4=280, source=SHEET_LATE,
        notes={"the board of a cloud: slower products than an A10, and some collections give it the A10's": ""},
    ),
    row("a40", "sm86", 48, 0.696, checked=True, fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7, int8=299.3, int4=598.7,
        source=HMC_LATE),
    row("orin agx", "sm87", 64, 0.2048, aliases=("orin",), fp32=5.3, tf32=21, bf16=42, fp16=42, int8=85,
        source=SHEET, notes={"memory is the CPU's too": "memory bandwidth"}),
    row(
        "l4", "sm89", 24, 0.30, checked=True,
        fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242, int8=242, source=COLLECTED_SPECS,
        notes={SPARSE: "bf16 fp16 fp8 int8"},
    ),
    row("l20", "sm89", 48, 0.864, checked=True, fp32=59.8, tf32=59.8, bf16=119.5, fp16=119.5, fp8=239, int8=239,
        source=SHEET),
    row("l40", "sm89", 48, 0.864, checked=True, fp32=90.5, tf32=90.5, bf16=181.05, fp16=181.05, fp8=362, int8=362,
        int4=724, source=L40_SHEET),
    row("l40s", "sm89", 48, 0.864, checked=True, fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733, int4=733,
        sources={"int4": L40_SHEET}),
    row(
        "h100", "sm90", 80, 3.35, aliases=("h100 sxm5", "h100 hbm3"), achieved={"bf16": 794.5, "fp8": 1402.6},
        fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979, notes={SPARSE: "bf16 fp16 fp8 int8"},
    ),
    row(
        "h100 pcie", "sm90", 80, 2.0,
        fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513, notes={SPARSE: "bf16 fp16 fp8 int8"},
    ),
    row(
        "h100 nvl", "sm90", 94, 3.9, fp32=60, tf32=418, bf16=835, fp16=835, fp8=1671, int8=1671, source=SHEET,
        faster={"bf16": 965, "fp16": 965, "fp8": 1930, "int8": 1930}, notes={CLOCKS: "bf16 fp16 fp8 int8"},
    ),
    row(
        "h800", "sm90", 80, 3.35, aliases=("h800 sxm5",), bf16=989, fp16=989, fp8=1979, int8=1979,
        source=DATASHEETS, notes={NVLINK: "", SPARSE: "bf16 fp16 fp8 int8"},
    ),
    row(
        "h200", "sm90", 141, 4.8, aliases=("h200 sxm",), achieved={"fp8": 1453},
        fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979, notes={SPARSE: "bf16 fp16 fp8 int8"},
    ),
    row(
        "h200 nvl", "sm90", 141, 4.8, fp32=60, tf32=418, bf16=835, fp16=835, fp8=1671, int8=1671, source=SHEET_LATE,
        faster={"bf16": 965, "fp16": 965, "fp8": 1930, "int8": 1930}, notes={CLOCKS: "bf16 fp16 fp8 int8"},
    ),
    row(
        "gh200", "sm90", 96, 4.0, aliases=("gh200 480gb", "gh200 96gb"),
        fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979,
        notes={"sold with 96 and with 141 GB; this is the one with 96. The driver calls it by the 480 GB of its CPU":
               "memory bandwidth"},
    ),
    row(
        "gh200 141gb", "sm90", 141, 4.8, aliases=("gh200 hbm3e", "gh200 144gb"),
        achieved={"bf16": 828.6, "fp8": 1535},
        fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979,
        notes={"sold with 96 and with 141 GB; this is the one with 141": "memory bandwidth"},
    ),
    row(
        "h20", "sm90", 96, 4.0, fp32=44, tf32=74, bf16=148, fp16=148, fp8=296, int8=296, source=SHEET,
        notes={"later boards have 141 GB": "memory",
               "an H100's bandwidth beside 15 % of its products: low precision pays off in bytes sooner than in FLOP":
               "bf16 fp16 fp8 int8"},
    ),
    row(
        "b100", "sm100", 192, 8.0,
        fp32=60, tf32=875, bf16=1750, fp16=1750, fp8=3500, int8=3500, fp6=3500, fp4=7000, source=HMC,
        notes={RANGE: "bandwidth", SPARSE: "bf16 fp16 fp8 int8 fp6 fp4"},
    ),
    row(
        "b200", "sm100", 180, 8.0, achieved={"bf16": 1745, "fp8": 3432},
        fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp6=4500, fp4=9000,
        sources={"fp32": BLACKWELL_BRIEF, "memory bandwidth": BLACKWELL_SHEET},
        notes={RANGE: "bandwidth", "FP32 is given as 75 and as 80 TFLOPS": "fp32",
               SPARSE: "bf16 fp16 fp8 int8 fp6 fp4"},
    ),
    row(
        "gb200", "sm100", 186, 8.0,
        fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp6=5000, fp4=10000,
        sources={"memory bandwidth": BLACKWELL_SHEET},
        notes={"numbers of one GPU, of which the board has two": "", SPARSE: "bf16 fp16 fp8 int8 fp6 fp4"},
    ),
    row(
        "b300", "sm103", 288, 8.0, seen=268.6, achieved={"bf16": 1769, "fp8": 3353},
        fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=150, fp6=4500, fp4=12600,
        sources={"fp32 int8": BLACKWELL_BRIEF},
        notes={INT8_SLOW: "int8", _FP4_ULTRA: "fp4",
               "FP32 is given as 75 and as 80 TFLOPS": "fp32",
               "nvidia-smi shows 275040 MiB; NVIDIA's Blackwell brief prints 270 GB and 7.7 TB/s": "memory bandwidth",
               SPARSE: "bf16 fp16 fp8 fp6"},
    ),
    row(
        "gb300", "sm103", 279, 8.0,
        fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=165, fp6=5000, fp4=15000,
        sources={"int8": BLACKWELL_BRIEF},
        notes={INT8_SLOW: "int8", "memory is published as 279 to 288 GB": "memory",
               "numbers of one GPU, of which the board has two": "", SPARSE: "bf16 fp16 fp8 fp6"},
    ),
    row(
        "rubin", None, 288, 22, vendor="nvidia", formats=NATIVE["sm100"],
        fp32=130, tf32=2000, bf16=4000, fp16=4000, fp8=17500, int8=2500, fp6=17500, fp4=35000, source=COLLECTED,
        notes={"announced; capability not known, and what it multiplies is taken from the generation before": ""},
    ),
)  # fmt: skip
