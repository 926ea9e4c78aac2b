"""Who says the numbers of the rows, and the notes that several rows share."""

from __future__ import annotations

from narrowcast.hardware.gpu import Source

_READ, _LATE = "2026-08-22", "2026-11-30"

COLLECTED = Source("vendor datasheets as collected in stas00/ml-engineering", _READ)
MEASURED = Source("largest products found by the MAMF finder, stas00/ml-engineering", _READ)
SHEET = Source("the vendor's datasheet, not checked against a second source", _READ)
SHEET_LATE = SHEET._replace(date=_LATE)
HMC = Source("hmc-tech.com", _READ)
SCALING = Source("jax-ml/scaling-book", _READ)

VOLTA_AMPERE = Source("NVIDIA A100 architecture whitepaper, table 1", _LATE)
GA102 = Source("NVIDIA Ampere GA102 architecture whitepaper, appendix A", _LATE)
ADA = Source("NVIDIA Ada architecture whitepaper 2.1, appendix A", _LATE)
ADA_PRO = Source("NVIDIA Ada professional architecture whitepaper 1.1", _LATE)
RTX_BLACKWELL = Source("NVIDIA RTX Blackwell architecture whitepaper 1.1, appendix A", _LATE)
BLACKWELL_BRIEF = Source("NVIDIA Blackwell architecture technical brief 2.1, table 3", _LATE)
BLACKWELL_SHEET = Source("NVIDIA Blackwell datasheet, individual GPU", _LATE)
PRO_SERVER = Source("NVIDIA RTX PRO 6000 Blackwell Server Edition, product page and datasheet", _LATE)
L40_SHEET = Source("NVIDIA L40 and L40S datasheet", _LATE)
HMC_LATE = Source("hmc-tech.com", _LATE)
COLLECTED_SPECS = Source("datasheets as collected in gmasse/gpu-specs", _LATE)
DATASHEETS = Source("datasheets as collected in astroC86/gpu-datasheet", _LATE)

FNUZ = "matrix units read E4M3FNUZ: engines double the scales of an E4M3FN checkpoint and clear its 0x80 while loading"
INT8_SLOW = (
    "INT8 is given as about 0.15 POPS by NVIDIA's Blackwell brief and as 4500 TOPS by a collection of datasheets; "
    "count on the slow one"
)
RANGE = "bandwidth is published as 7.7 to 8.0 TB/s; floors take the upper end"
SPARSE = "pages that print twice these rates count products with half of the operands zero (2:4 sparsity)"
CLOCKS = "the printed rates are below what its clock allows: short runs of large products go above them"
NVLINK = "sold with a narrower NVLink, which tensor parallelism feels"


def unchecked(source: Source) -> Source:
    """A source that no second one confirms."""
    return source._replace(words=f"{source.words}; not checked against a second source")


def halved(fp16: float, fp8: float | None = None) -> str:
    """The note of a GeForce: what is halved, and the full rates in TFLOPS."""
    kinds, full = "FP16", f"{fp16:g} TFLOPS in FP16"
    if fp8 is not None:
        kinds, full = (
            "FP16 and FP8",
            f"{full}, {fp8:g} in FP8, which torch and CUTLASS call fast accumulation",
        )
    return f"GeForce runs {kinds} products at half rate when they accumulate in FP32; accumulated in FP16: {full}"
