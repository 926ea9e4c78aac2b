"""Accelerators of AMD, Intel and Google, and the processor."""

from __future__ import annotations

from narrowcast.hardware.gpu import GPU, NATIVE, Source
from narrowcast.hardware.gpu_rows.sources import FNUZ, SCALING, SHEET_LATE
from narrowcast.hardware.gpu_rows.writing import row

_TPU = frozenset({"bf16", "int8"})

ROWS: tuple[GPU, ...] = (
    row(
        "mi210", "gfx90a", 64, 1.638, fp32=45.3, bf16=181, fp16=181, int8=181, source=SHEET_LATE,
        notes={"no FP8": "fp8"},
    ),
    row("mi250x", "gfx90a", 128, 3.28, fp32=47.9, bf16=383, fp16=383, int8=383, notes={
        "no FP8": "fp8", "two dies, which programs see as two GPUs of half of everything": "",
    }),
    row(
        "mi300a", "gfx942", 128, 5.3,
        fp32=122.6, tf32=490.3, bf16=980.6, fp16=980.6, fp8=1961.2, int8=1961.2, source=SHEET_LATE,
        notes={FNUZ: "fp8", "memory is the CPU's too": "memory bandwidth"},
    ),
    row(
        "mi300x", "gfx942", 192, 5.3, achieved={"bf16": 668.4},
        fp32=163.4, tf32=653.7, bf16=1307, fp16=1307, fp8=2615, int8=2615, notes={FNUZ: "fp8"},
    ),
    row(
        "mi325x", "gfx942", 256, 6.0, achieved={"bf16": 784.9},
        fp32=163.4, tf32=653.7, bf16=1307, fp16=1307, fp8=2615, int8=2615, notes={FNUZ: "fp8"},
    ),
    row("mi350x", "gfx950", 288, 8.0, fp32=144, bf16=2300, fp16=2300, fp8=4600, int8=4600, fp6=9200, fp4=9200),
    row(
        "mi355x", "gfx950", 288, 8.0, achieved={"bf16": 1565},
        fp32=157.3, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp6=10100, fp4=10100,
        notes={"older collections give it the MI350X's 2300 in BF16": "bf16 fp16 fp8 int8 fp6 fp4"},
    ),
    row(
        "mi455x", None, 432, 23.3, vendor="amd", formats=NATIVE["gfx950"],
        fp32=315, bf16=5000, fp16=5000, fp8=10000, int8=5000, fp6=10000, fp4=20000,
        notes={"announced; architecture not known, and what it multiplies is taken from the generation before": ""},
    ),
    row(
        "gaudi2", None, 96, 2.46, vendor="intel", formats=frozenset({"bf16", "e4m3_ieee"}),
        achieved={"bf16": 419, "fp8": 826}, bf16=432, fp8=865,
        notes={"FP8 reaches 240, not 448": "fp8", "rates of FP32, TF32, FP16 and INT8 are not published": ""},
    ),
    row(
        "gaudi3", None, 128, 3.70, vendor="intel", formats=frozenset({"bf16", "fp16", "e4m3fn"}),
        fp32=229, tf32=459, bf16=1677, fp16=459, fp8=1677,
        notes={"a flag brings FP8's range down to 240": "fp8",
               "1835 TFLOPS of its paper is for 1750 MHz; it runs at 1600": "bf16 fp8"},
    ),
    row("tpu v5e", None, 16, 0.82, vendor="google", formats=_TPU, bf16=197, int8=394, source=SCALING),
    row("tpu v5p", None, 95, 2.76, vendor="google", formats=_TPU, bf16=459, int8=918, source=SCALING),
    row(
        "tpu v6e", None, 32, 1.64, vendor="google", formats=_TPU, bf16=918, fp8=918, int8=1836, source=SCALING,
        notes={"FP8 runs at the rate of BF16": "fp8",
               "bandwidth is published as 1.6 to 1.64 TB/s; floors take the upper end": "bandwidth"},
    ),
    row(
        "tpu v7x", None, 192, 7.37, vendor="google", formats=frozenset({"bf16", "e4m3fn"}), bf16=2307, fp8=4614,
        notes={"the rate of INT8 is not published": "int8"},
    ),
    GPU(
        "cpu", ("x86", "x86_64"), "cpu", "cpu", None, None, None, frozenset({"bf16", "int8"}),
        Source("vLLM 0.32 (CPU build)", "2026-08-22"),
        notes={"memory and bandwidth are the machine's own; BF16 and INT8 need AVX512_BF16, VNNI or AMX": frozenset()},
    ),
)  # fmt: skip
