"""Dense peaks of the matrix units in TFLOPS (integers in TOPS), and what large products reached in measurements.

Dense: marketing pages often print the rate with half of the operands zero, twice as much. Accumulated in FP32 where
there is a choice. A column that is not here is not known, or the unit is not there.
"""

from __future__ import annotations

from collections.abc import Mapping


def _peaks(**tera: float) -> Mapping[str, float]:
    return tera


PEAKS: Mapping[str, Mapping[str, float]] = {
    "v100": _peaks(fp32=15.7, fp16=125, int8=62),
    "t4": _peaks(fp32=8.1, fp16=65, int8=130, int4=260),
    "a100": _peaks(fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624, int4=1248),
    "a10": _peaks(fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250),
    "rtx a6000": _peaks(fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, int8=309.7),
    "rtx 3090": _peaks(fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
    "orin agx": _peaks(fp32=5.3, tf32=21, bf16=42, fp16=42, int8=85),
    "l4": _peaks(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242, int8=242),
    "l20": _peaks(fp32=59.8, tf32=59.8, bf16=119.5, fp16=119.5, fp8=239, int8=239),
    "l40s": _peaks(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733),
    "rtx 4090": _peaks(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
    "h100": _peaks(fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979),
    "h100 pcie": _peaks(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513),
    "h100 nvl": _peaks(fp32=60, tf32=418, bf16=835, fp16=835, fp8=1671, int8=1671),
    "h200": _peaks(fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979),
    "gh200": _peaks(fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979),
    "gh200 141gb": _peaks(fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979, int8=1979),
    "h20": _peaks(fp32=44, tf32=74, bf16=148, fp16=148, fp8=296, int8=296),
    "b100": _peaks(fp32=60, tf32=875, bf16=1750, fp16=1750, fp8=3500, int8=3500, fp6=3500, fp4=7000),
    "b200": _peaks(fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp6=4500, fp4=9000),
    "gb200": _peaks(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp6=5000, fp4=10000),
    "b300": _peaks(fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=150, fp6=4500, fp4=12600),
    "gb300": _peaks(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=150, fp6=5000, fp4=15000),
    "rtx 5090": _peaks(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838, fp4=1676),
    "rtx pro 6000": _peaks(fp32=125, tf32=252, bf16=504, fp16=504, fp8=1007, int8=1007, fp6=1007, fp4=2015),
    "gb10": _peaks(fp32=31, tf32=31, bf16=62, fp16=62, fp8=124, int8=248, fp6=248, fp4=496),
    "rubin": _peaks(fp32=130, tf32=2000, bf16=4000, fp16=4000, fp8=17500, int8=2500, fp6=17500, fp4=35000),
    "mi250x": _peaks(fp32=47.9, bf16=383, fp16=383, int8=383),
    "mi300x": _peaks(fp32=163.4, tf32=653.7, bf16=1307, fp16=1307, fp8=2615, int8=2615),
    "mi325x": _peaks(fp32=163.4, tf32=653.7, bf16=1307, fp16=1307, fp8=2615, int8=2615),
    "mi350x": _peaks(fp32=144, bf16=2300, fp16=2300, fp8=4600, int8=4600, fp6=9200, fp4=9200),
    "mi355x": _peaks(fp32=157.3, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp6=10100, fp4=10100),
    "mi455x": _peaks(fp32=315, bf16=5000, fp16=5000, fp8=10000, int8=5000, fp6=10000, fp4=20000),
    "gaudi2": _peaks(bf16=432, fp8=865),
    "gaudi3": _peaks(fp32=229, tf32=459, bf16=1677, fp16=459, fp8=1677),
    "tpu v5e": _peaks(bf16=197, int8=394),
    "tpu v5p": _peaks(bf16=459, int8=918),
    "tpu v6e": _peaks(bf16=918, fp8=918, int8=1836),
    "tpu v7x": _peaks(bf16=2307, fp8=4614),
}

ACHIEVED: Mapping[str, Mapping[str, float]] = {
    "a100": _peaks(bf16=271),
    "h100": _peaks(bf16=794, fp8=1403),
    "h200": _peaks(fp8=1453),
    "b200": _peaks(bf16=1745, fp8=3432),
    "b300": _peaks(bf16=1769, fp8=3353),
    "mi300x": _peaks(bf16=668),
    "mi355x": _peaks(bf16=1565),
    "gaudi2": _peaks(bf16=419, fp8=826),
}
