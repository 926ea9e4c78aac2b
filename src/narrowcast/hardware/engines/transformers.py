"""transformers 5.24: which containers it loads, and that nearly all of it multiplies in 16 bits.

compressed-tensors decompresses each weight on the first forward pass; FP8 kernels are there on request only
(``use_optimized_inference``). Native FP8 runs in FP8 from compute capability 8.9 and is dequantized below, gpt-oss
likewise from 7.5 and with Triton and the kernels package. GPTQ, AWQ, auto-round and Quark need their own libraries.

Source: transformers 5.24.0 (quantizers/). Which kernel a library picks is its own matter and not listed.
"""

from __future__ import annotations

from narrowcast.hardware.engines.row import (
    ANY,
    CPU,
    DEQUANTIZED,
    ROCM,
    UNKNOWN,
    WEIGHT_ONLY,
    Engine,
    Kernel,
    Reach,
    row,
    sm,
)

_SOURCE = "transformers 5.24.0, quantizers"
_BLOCK = ("fp8_block128", "fp8_block")


def _library(name: str, arithmetic: str, reach: Reach = ANY, note: str = "") -> tuple[Kernel, ...]:
    return (Kernel(name, arithmetic, reach, note=note),)


_DECOMPRESSED = _library(
    "compressed-tensors", DEQUANTIZED, note="each weight is decompressed on the first forward pass"
)
_FP8_KERNELS = (
    "use_optimized_inference=True in CompressedTensorsConfig computes in FP8 from compute capability 8.9"
)

_ROWS = (
    row(
        "compressed-tensors", ("fp8_tensor", "fp8_channel"), ("fp8_token", "fp8_static", "fp8_tensor"),
        family=_DECOMPRESSED, notes=(_FP8_KERNELS,),
    ),
    row("compressed-tensors", family=_DECOMPRESSED),
    row(
        "fp8", "fp8_tensor",
        refusal="one scale per tensor is looked for as weight_scale_inv and stored as weight_scale",
        remedy="fp8_block, or --to compressed-tensors",
    ),
    row(
        "fp8", (*_BLOCK, "mxfp8", "mxfp4"), cut=True,
        refusal="a block is found as shape / grid, so where the edge cuts one, all are taken for smaller ones",
        remedy="a block that divides the matrix, or fp8_dynamic in compressed-tensors",
    ),
    row("fp8", (*_BLOCK, "mxfp8"), family=_library("finegrained-fp8", "fp8", sm(89)), reach=sm(89)),
    row(
        "fp8", (*_BLOCK, "mxfp8", "mxfp4"), family=_library("finegrained-fp8", DEQUANTIZED),
        notes=("FP8 kernels ask for compute capability 8.9; the model is dequantized while loading",),
    ),
    row(
        "mxfp4", "mxfp4", family=_library("triton_kernels", WEIGHT_ONLY, Reach(75, archs=ROCM + CPU)),
        reach=Reach(75, archs=ROCM + CPU),
        notes=("needs Triton 3.4 (3.5 on a CPU) and the kernels package, and is dequantized without them",),
    ),
    row(
        "mxfp4", "mxfp4", family=_library("dequantized", DEQUANTIZED),
        notes=("kernels ask for compute capability 7.5",),
    ),
    row("gptq", family=_library("gptqmodel", WEIGHT_ONLY), notes=("needs gptqmodel and optimum",)),
    row("awq", formats=("gemv",), refusal="the gemv order is not read", remedy="--to awq writes the gemm order"),
    row("awq", family=_library("gptqmodel", WEIGHT_ONLY), notes=("needs gptqmodel; runs in float16 on CUDA",)),
    row("auto-round", family=_library("auto-round", UNKNOWN), notes=("needs auto-round",)),
    row("quark", family=_library("amd-quark", UNKNOWN), notes=("needs amd-quark; not tried here",)),
    row("torchao", family=_library("torchao", UNKNOWN), notes=("needs torchao",)),
    row("bitsandbytes", "int8_channel", family=_library("bitsandbytes", "int8"), notes=("needs bitsandbytes",)),
    row("bitsandbytes", family=_library("bitsandbytes", WEIGHT_ONLY), notes=("needs bitsandbytes",)),
    row("fbgemm-fp8", family=_library("fbgemm-gpu", "fp8", sm(90)), reach=sm(90), notes=("needs fbgemm-gpu",)),
    row(
        "fbgemm-fp8", refusal="FP8 quantized models is only supported on GPUs with compute capability >= 9.0",
        remedy="--to compressed-tensors",
    ),
    row("gguf", family=_library("gguf", DEQUANTIZED), notes=("needs gguf; the model is dequantized while loading",)),
    row(
        "modelopt", refusal="Unknown quantization type, got modelopt",
        remedy="--to compressed-tensors, where the preset is one of its own",
    ),
)  # fmt: skip

ENGINE = Engine(
    "transformers", "5.24.0", _ROWS, "transformers has no reader for {container}",
    "--to compressed-tensors", ANY, _SOURCE,
)  # fmt: skip
