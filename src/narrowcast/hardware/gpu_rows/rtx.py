"""NVIDIA's cards for workstations and players, and DGX Spark."""

from __future__ import annotations

from narrowcast.hardware.gpu import GPU
from narrowcast.hardware.gpu_rows.sources import (
    ADA,
    ADA_PRO,
    GA102,
    HMC,
    HMC_LATE,
    PRO_SERVER,
    RTX_BLACKWELL,
    SHEET,
    SPARSE,
    halved,
    unchecked,
)
from narrowcast.hardware.gpu_rows.writing import row

# cuBLASLt on an RTX 5090 lies between the halved rate and the full one (xzwgit/gpu-flops-bench).
_FASTER = "FP8 products of cuBLASLt were measured at 773 TFLOPS: kernels that accumulate fast go above the rate here"

ROWS: tuple[GPU, ...] = (
    row("rtx a6000", "sm86", 48, 0.768, aliases=("a6000",), fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, int8=309.7,
        source=SHEET),
    row(
        "rtx 3090", "sm86", 24, 0.936, aliases=("3090",),
        fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284, int4=568, source=GA102,
        sources={"int4": unchecked(GA102)}, notes={halved(142): "fp16 bf16"},
    ),
    row(
        "rtx 6000 ada", "sm89", 48, 0.960, aliases=("6000 ada",),
        fp32=91.1, tf32=182.1, bf16=364.2, fp16=364.2, fp8=728.5, int8=728.5, int4=1457, source=unchecked(ADA_PRO),
    ),
    row(
        "rtx 4080", "sm89", 16, 0.7168, aliases=("4080",),
        fp32=48.7, tf32=48.7, bf16=97.5, fp16=97.5, fp8=194.9, int8=389.9, int4=779.8, source=unchecked(ADA),
        faster={"fp8": 389.9}, notes={halved(194.9, 389.9): "fp16 bf16 fp8"},
    ),
    row(
        "rtx 4090", "sm89", 24, 1.008, aliases=("4090",),
        fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6, int4=1321.2, source=ADA,
        faster={"fp8": 660.6}, notes={halved(330.3, 660.6): "fp16 bf16 fp8",
               "versions of the whitepaper before 2.02 print 660.6 for FP8 accumulated in FP32": "fp8"},
    ),
    row(
        "rtx 5080", "sm120", 16, 0.960, aliases=("5080",),
        fp32=56.3, tf32=56.3, bf16=112.6, fp16=112.6, fp8=225.1, int8=450.2, fp4=900.4, source=unchecked(RTX_BLACKWELL),
        faster={"fp8": 450.2}, notes={halved(225.1, 450.2): "fp16 bf16 fp8", SPARSE: "fp4"},
    ),
    row(
        "rtx 5090", "sm120", 32, 1.792, aliases=("5090",),
        fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838, fp4=1676, source=RTX_BLACKWELL,
        faster={"fp8": 838, "bf16": 236, "fp16": 224.4},  # products of torch (zzc0721/torch-performance-test-data#15)
        notes={halved(419, 838): "fp16 bf16 fp8", _FASTER: "fp8", SPARSE: "fp4"},
    ),
    row(
        "rtx pro 6000", "sm120", 96, 1.792, aliases=("pro 6000",),
        fp32=125, tf32=251.9, bf16=503.8, fp16=503.8, fp8=1007, int8=1007, fp6=1007, fp4=2015,
        source=HMC_LATE, sources={"fp6": SHEET},
        notes={SPARSE: "fp4"},
    ),
    row(
        "rtx pro 6000 server", "sm120", 96, 1.597, aliases=("pro 6000 server",), fp32=120, source=PRO_SERVER,
        notes={"rates of other formats are not published for this edition": "tf32 bf16 fp16 fp8 int8 fp6 fp4"},
    ),
    row(
        "gb10", "sm121", 128, 0.273, seen=121.69, aliases=("dgx spark",),
        fp32=31, tf32=31, bf16=62, fp16=62, fp8=124, int8=248, fp4=496, source=HMC,
        faster={"fp8": 248}, notes={"memory is the CPU's too": "memory bandwidth",
               "FP16 and FP8 products run at half rate when they accumulate in FP32": "fp16 bf16 fp8",
               "1 PFLOPS on its page counts products with half of the operands zero": "fp4"},
    ),
)  # fmt: skip
