"""vLLM's lines about layers that do not run as their format promises: weight-only, emulated, unoptimized."""

from __future__ import annotations

from narrowcast.doctor.rows import SGLANG, VLLM, Complaint

_QUANT = "vLLM 0.32 model_executor/layers/quantization/"
_LINEAR = "vLLM 0.32 model_executor/kernels/linear/"
_MOE = "vLLM 0.32 model_executor/layers/fused_moe/"
_16_BIT = (
    "Weights stay as small in memory as promised and are read as fast; arithmetic is 16 bit. Small batches "
    "gain, "
    "large batches and long prompts gain nothing over bf16 and may be slower."
)
_EMULATED = (
    "Every call decodes the weights (and rounds activations) in software and multiplies in 16 bit: the "
    "numbers are "
    "those of the format, but it is slower than bf16. Good for checking accuracy, not for serving."
)

_WEIGHT_ONLY = (
    Complaint(
        "weight-only-fp8",
        "warning",
        (*VLLM, *SGLANG),
        ("FP8",),
        r"does not have native support for FP8 computation",
        "This GPU cannot multiply in FP8: FP8 weights run through Marlin, a weight-only kernel.",
        f"{_16_BIT} Activations are not rounded to FP8.",
        "FP8 arithmetic needs compute capability 8.9 or more; below that, `narrowcast quantize MODEL OUT "
        "--preset "
        "int8` makes weights that are multiplied in 8 bit from 7.5 on. For memory alone nothing needs to "
        "change.",
        _QUANT + "utils/marlin_utils_fp8.py",
    ),
    Complaint(
        "weight-only-fp4",
        "warning",
        (*VLLM, *SGLANG),
        ("FP4",),
        r"does not have native support for FP4 computation|lacks native FP4 compute",
        "This GPU cannot multiply in FP4: FP4 weights run through Marlin, a weight-only kernel.",
        f"{_16_BIT} Activations are not rounded to FP4.",
        "FP4 arithmetic needs Blackwell (compute capability 10 or 12). For memory alone nothing needs to "
        "change; "
        "an nvfp4a16 or mxfp4a16 file says the same with less to calibrate.",
        _QUANT + "utils/marlin_utils_fp4.py",
    ),
    Complaint(
        "weight-only-by-choice",
        "warning",
        VLLM,
        ("Selected",),
        r"Selected (?P<kernel>(?:Marlin|Humming)\w+|XPUW8A16\w+) for "
        r"\w*(?:W8A8|Fp8LinearMethod|Fp8PerBlock|Int8)",
        "Layers meant for 8-bit weights and inputs run in the weight-only kernel {kernel}.",
        _16_BIT,
        "See whether --linear-backend or VLLM_DISABLED_KERNELS asks for it; if not, the faster kernels "
        "refuse this "
        "GPU or these shapes (VLLM_LOGGING_LEVEL=DEBUG prints why).",
        _LINEAR + "__init__.py",
    ),
    Complaint(
        "weight-only-block-format",
        "info",
        VLLM,
        ("Using",),
        r"Using (?P<kernel>(?:Marlin|Humming)\w+|\w+W4A16\w+) for (?P<scheme>NVFP4|MXFP4|MXFP6|MXFP8) GEMM",
        "{scheme} layers run in the weight-only kernel {kernel}.",
        f"{_16_BIT} Right for a file whose inputs stay 16 bit (nvfp4a16, mxfp4a16), a loss for one whose do "
        f"not.",
        "`narrowcast inspect MODEL` shows whether the file quantizes inputs.",
        _LINEAR + "__init__.py",
    ),
    Complaint(
        "inputs-not-quantized",
        "warning",
        VLLM,
        ("A16",),
        r"\b(?P<kernel>\w+) is a weight-only \(A16\) kernel; the requested activation quantization .* is "
        r"ignored",
        "{kernel} ignores the file's quantization of inputs.",
        _16_BIT,
        "Accuracy can only be better than the file's scheme; for speed use a GPU with native MXFP4.",
        _LINEAR + "mxfp4/marlin.py",
    ),
    Complaint(
        "expert-inputs-16-bit",
        "warning",
        VLLM,
        ("Mxfp4",),
        r"No Mxfp4 MoE backend supports activation=(?P<wanted>\S+) .*Falling back to '(?P<kernel>[^']+)'",
        "No expert kernel takes {wanted} inputs here; {kernel} runs with bf16 inputs.",
        _16_BIT,
        "Use a GPU with native MXFP4, or accept it: accuracy can only be better.",
        _MOE + "oracle/mxfp4.py",
    ),
    Complaint(
        "other-inputs",
        "warning",
        VLLM,
        ("MXFP4",),
        r"No MXFP4 linear kernel supports (?P<wanted>\S+) activations .*falling back to MXFP4 activations",
        "No kernel takes {wanted} inputs here; inputs are rounded to MXFP4 instead.",
        "Inputs lose more than the file's scheme asks for: 4 bits where it has 8. Accuracy is not that of "
        "the file.",
        "Use a GPU or version that has the kernel, or a weight-only file (`--preset mxfp4a16`).",
        _QUANT + "compressed_tensors/schemes/compressed_tensors_w4a8_mxfp4.py",
    ),
)

_EMULATION = (
    Complaint(
        "emulated-nvfp4",
        "warning",
        VLLM,
        ("emulation",),
        r"NVFP4 linear falling back to the slow and unoptimized emulation backend",
        "NVFP4 layers are emulated: no NVFP4 kernel of this build runs on this machine.",
        _EMULATED,
        "The reasons are in the lines that follow; usually a GPU that is not Blackwell, or a build without "
        "FlashInfer. On older GPUs --linear-backend marlin runs NVFP4 weights with 16-bit arithmetic.",
        _LINEAR + "__init__.py",
        follow=r"^\s*- (?P<detail>.+)",
    ),
    Complaint(
        "emulated-mx",
        "warning",
        VLLM,
        ("QDQ",),
        r"[Ss]imulated weight dequantization and activation QDQ",
        "MXFP4 or MXFP6 layers are emulated: the platform has no kernel for them.",
        _EMULATED,
        "Use a GPU with native MX formats, or on this one the mxfp4a16 preset, which Marlin runs from "
        "compute "
        "capability 7.5 on.",
        _LINEAR + "mxfp4/emulation.py",
    ),
    Complaint(
        "emulated-kernel",
        "warning",
        VLLM,
        ("Using", "Selected"),
        r"(?:Using|Selected) (?P<kernel>Emulation\w+) for (?P<scheme>\w+)",
        "{scheme} layers are emulated by {kernel}.",
        _EMULATED,
        "Look for the warning beside it, which gives the reason; take --linear-backend emulation away if it "
        "is set.",
        _LINEAR + "__init__.py",
    ),
    Complaint(
        "emulated-aiter",
        "warning",
        VLLM,
        ("Aiter", "AITER"),
        r"Aiter Triton kernel not found\. Using emulation mode|but AITER is not found or not supported",
        "MXFP4 layers are emulated: AMD's AITER kernels are missing.",
        _EMULATED,
        "Install AITER (github.com/ROCm/aiter) in the version that this vLLM wants.",
        _QUANT + "quark/schemes/quark_w4a8_mxfp4_fp8.py",
    ),
    Complaint(
        "emulated-experts",
        "warning",
        VLLM,
        ("Using",),
        r"Using (?P<kernel>\w*EmulationTritonExperts) (?:MOE|MoE) backend|"
        r"Using '?EMULATION'? \w+ MoE backend|Using OCP MX emulation for",
        "Experts are emulated.",
        f"{_EMULATED} Int4 and MXFP8 experts may even be kept as bf16 in memory.",
        "Use a device with native support, or a format that it has.",
        _MOE + "experts/nvfp4_emulation_moe.py",
    ),
    Complaint(
        "experts-widened",
        "warning",
        VLLM,
        ("dequant",),
        r"MXFP8->BF16 load-time dequant complete",
        "Experts were decoded to bf16 when they were loaded.",
        "They take twice the memory of the file and run at bf16 speed.",
        "Plan memory for bf16 experts, or use a GPU with an MXFP8 expert kernel.",
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "nvfp4-cpu-untested",
        "warning",
        VLLM,
        ("QuarkNVFP4",),
        r"is tested with QuarkNVFP4, got kernel=(?P<kernel>\S+?)\.? ",
        "{kernel} was never tested with Quark's NVFP4 files.",
        "Results may be wrong without any further sign.",
        "Compare some answers with the bf16 model, or convert: `narrowcast convert MODEL OUT --to modelopt`.",
        _QUANT + "quark/schemes/quark_nvfp4.py",
    ),
)

_UNOPTIMIZED = (
    Complaint(
        "unoptimized-awq",
        "warning",
        VLLM,
        ("AutoAWQMarlin", "AWQMarlin"),
        r"Layer '(?P<layer>[^']+)' is not supported by (?:Auto)?AWQMarlin\. Falling back to unoptimized AWQ",
        "Layer {layer} and perhaps others run in the old AWQ kernel.",
        "Correct, but far slower than Marlin; such layers set the pace of the whole model.",
        "Shapes or group size do not fit Marlin (after splitting over GPUs): use fewer GPUs per model, or "
        "group size "
        "128 or 64.",
        _QUANT + "auto_awq.py",
    ),
    Complaint(
        "unoptimized-experts",
        "warning",
        (*VLLM, *SGLANG),
        ("Layer",),
        r"Layer '(?P<layer>[^']+)' is not supported by (?P<kernel>\w*Mo?[eE]Marlin)\. Falling back to Moe "
        r"WNA16",
        "Experts such as {layer} run in the Moe WNA16 kernel and not in Marlin.",
        "Correct, but slower, most of all for large batches.",
        "Shapes or group size do not fit Marlin (after splitting over GPUs): use fewer GPUs per model, or "
        "--enable-expert-parallel, which leaves experts whole.",
        _QUANT + "auto_gptq.py",
    ),
    Complaint(
        "layers-not-quantized",
        "info",
        VLLM,
        ("falling",),
        r"MXFP4 (?:linear|attention) layer is not implemented",
        "Linear layers outside the experts stay unquantized.",
        "Right for gpt-oss files, where only experts are MXFP4.",
        "Nothing, unless the file holds MXFP4 attention layers: `narrowcast inspect MODEL` shows.",
        _QUANT + "mxfp4.py",
    ),
    Complaint(
        "padded",
        "info",
        VLLM,
        ("padding", "Padding"),
        r"Marlin requires thread-tile padding|Padding hidden size from \d+ to \d+ for FlashInfer",
        "Some layers are padded to the kernel's tile and cut again in every call.",
        "Correct, somewhat slower.",
        "Usually from splitting over GPUs: fewer GPUs per model, if speed matters.",
        _QUANT + "utils/marlin_utils.py",
    ),
    Complaint(
        "untuned",
        "info",
        (*VLLM, *SGLANG),
        ("optimal",),
        r"Using default (?P<what>.*?(?:kernel )?config)\w*\. Performance might be sub-optimal",
        "There is no tuned configuration for these shapes on this GPU.",
        "Correct; the Triton kernel may be well below its best speed.",
        "Take another backend that needs no tuning, or tune with the engine's benchmark script for this "
        "kernel.",
        _QUANT + "utils/fp8_utils.py",
    ),
    Complaint(
        "not-optimized",
        "warning",
        (*VLLM, *SGLANG),
        ("optimized",),
        r"(?<!\S)(?P<method>\S+) quantization is not fully optimized yet",
        "The engine says that its {method} code is not fully optimized.",
        "Correct, but it can be slower than the unquantized model.",
        "For GPTQ and AWQ files drop --quantization, so that the Marlin kernels are taken; else convert to "
        "compressed-tensors: `narrowcast convert MODEL OUT --to compressed-tensors`.",
        "vLLM 0.8 config.py, SGLang 0.5.23 configs/model_config.py",
    ),
    Complaint(
        "backend-not-taken",
        "warning",
        VLLM,
        ("Tried",),
        r"Tried to force (?P<kernel>\w+), but the kernel couldn't be implemented",
        "The kernel that was asked for, {kernel}, does not take these layers; another one runs.",
        "Speed and rounding are those of the kernel that the log names instead.",
        "Drop the request, or use shapes, formats and a GPU that it supports.",
        _LINEAR + "__init__.py",
    ),
    Complaint(
        "backend-has-no-kernel",
        "warning",
        VLLM,
        ("linear",),
        r"--linear-backend=(?P<backend>\S+) (?:was requested, but no .* kernel exists|has no kernel for "
        r"this)",
        "--linear-backend {backend} has no kernel for some layers; they run in another one.",
        "Two kernels share the model; a comparison of backends compares less than it seems to.",
        "Give the backend per scheme, or leave the choice to the engine.",
        _LINEAR + "__init__.py",
    ),
    Complaint(
        "deep-gemm-off",
        "info",
        VLLM,
        ("DeepGemm",),
        r"Auto-disabled DeepGemm for model_type=(?P<family>\S+) on Blackwell",
        "DeepGEMM is switched off for {family}, because its power-of-two scales cost this family accuracy.",
        "CUTLASS computes with the file's own scales: slower, and right.",
        "Nothing.",
        "vLLM 0.32 config/vllm.py",
    ),
    Complaint(
        "eager",
        "info",
        VLLM,
        ("enforce_eager", "Enforce"),
        r"\benforce_eager=True\b|Enforce eager set",
        "Graphs and compilation are off (--enforce-eager).",
        "Small batches are dominated by launch overhead: speed measured so says little about formats.",
        "Drop --enforce-eager for measurements and for serving.",
        "vLLM 0.32 config/vllm.py",
    ),
)

COMPLAINTS = (*_WEIGHT_ONLY, *_EMULATION, *_UNOPTIMIZED)
