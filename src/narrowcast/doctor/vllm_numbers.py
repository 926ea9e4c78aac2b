"""vLLM's lines about numbers: scales that are missing or differ, the KV cache, casts, weights that did not load."""

from __future__ import annotations

from narrowcast.doctor.rows import SGLANG, VLLM, Complaint

_QUANT = "vLLM 0.32 model_executor/layers/quantization/"
_LOADER = "vLLM 0.32 model_executor/model_loader/"
CALIBRATED = (
    "`narrowcast calibrate-kv MODEL OUT --text FILE` gives it k_scale and v_scale made from text; or "
    "--kv-cache-dtype bfloat16; or, without calibration, --kv-cache-dtype fp8_per_token_head, where the backend "
    "has it."
)
_ONE_SCALE = (
    "The parts keep codes made for their own scales and are decoded with one of them: the others come out "
    "too large "
    "or too small by the ratio, in every layer."
)
_REPAIR = (
    "`narrowcast audit MODEL` gives layers and ratios; "
    "`narrowcast repair MODEL OUT` gives fused parts one outer scale."
)

_KV = (
    Complaint(
        "kv-scale-one",
        "warning",
        VLLM,
        ("scaling",),
        r"Using KV cache scaling factor 1\.0 for fp8",
        "The FP8 KV cache runs on the scale 1.0. The engine says the same for scales that are missing and "
        "for scales "
        "stored as 1.0.",
        "Keys and values beyond 448 are clipped and small ones lose bits. Often harmless for values; keys "
        "of models "
        "without QK norm can reach hundreds, and then long prompts degrade or answers turn into noise.",
        f"`narrowcast audit MODEL --for vllm` tells missing from 1.0. {CALIBRATED}",
        _QUANT + "kv_cache.py",
    ),
    Complaint(
        "q-scale-from-k",
        "info",
        VLLM,
        ("q",),
        r"Checkpoint does not provide a q scaling factor\. Setting it to k_scale",
        "Queries are scaled by the scale of keys, because the checkpoint has none for them.",
        "Only FP8 attention (FlashAttention 3, FlashInfer) rounds queries; queries larger than keys are "
        "clipped there.",
        "Usually none; if long answers degrade, compare with --kv-cache-dtype bfloat16.",
        _QUANT + "kv_cache.py",
    ),
    Complaint(
        "attention-uncalibrated",
        "warning",
        VLLM,
        ("uncalibrated",),
        r"Using uncalibrated q_scale (?P<q>\S+) and/or prob_scale (?P<prob>\S+) with fp8 attention",
        "FP8 attention runs with q_scale {q} and prob_scale {prob}, which nobody calibrated.",
        "Queries and attention probabilities are rounded to FP8 by chance scales; the loss grows with the "
        "prompt.",
        CALIBRATED,
        _QUANT + "kv_cache.py",
    ),
    Complaint(
        "kv-scale-deprecated",
        "warning",
        VLLM,
        ("kv_scale",),
        r"DEPRECATED\. Found kv_scale in the checkpoint",
        "The checkpoint has one kv_scale per layer, a spelling that the engine is about to drop.",
        "Keys and values share one scale now; a later version will read none and use 1.0.",
        "`narrowcast repair MODEL OUT` writes k_scale and v_scale.",
        _LOADER + "weight_utils.py",
    ),
    Complaint(
        "kv-scale-not-loaded",
        "error",
        (*VLLM, *SGLANG),
        ("Found",),
        r"Found (?P<scale>\w+_scale) in the checkpoint \(e\.g\. (?P<name>[^)]+)\), but not found the "
        r"expected name",
        "The checkpoint has {scale} for the KV cache ({name}) and the engine does not know where to put it.",
        "The scale is dropped and 1.0 is used, though the file is calibrated.",
        "`narrowcast audit MODEL --for vllm` lists the spellings, `narrowcast repair MODEL OUT` changes "
        "them.",
        _LOADER + "weight_utils.py",
    ),
    Complaint(
        "kv-algorithm-unknown",
        "warning",
        VLLM,
        ("kv_cache_quant_algo",),
        r"Unknown kv_cache_quant_algo '(?P<name>[^']*)' in model config.*Falling back to 'auto'",
        "The checkpoint asks for the KV cache format {name}, which the engine does not know.",
        "The KV cache stays in the model's dtype: correct, with twice the memory that was planned.",
        "Give --kv-cache-dtype, or correct kv_cache_quant_algo in hf_quant_config.json.",
        "vLLM 0.32 utils/torch_utils.py",
    ),
    Complaint(
        "kv-quantized",
        "info",
        VLLM,
        ("proper",),
        r"Using (?P<dtype>\S+) data type to store kv cache.*without a proper scaling factor",
        "The KV cache is {dtype}.",
        "Half the memory or less per token. The engine prints this for calibrated files as well.",
        "Lines on scaling factors, if any, tell more; their absence tells nothing for compressed-tensors files.",
        "vLLM 0.32 config/cache.py",
    ),
    Complaint(
        "prefill-not-fp8",
        "info",
        VLLM,
        ("prefill",),
        r"FP8 KV cache is enabled but prefill queries are not quantized to FP8",
        "Prompts are computed with 16-bit attention though the KV cache is FP8.",
        "Accurate; long prompts could be faster.",
        "Nothing, or the setting that the line itself names.",
        "vLLM 0.32 model_executor/layers/attention/mla_attention.py",
    ),
)

_FUSED = (
    Complaint(
        "fused-weight-scales-differ",
        "error",
        VLLM,
        ("global",),
        r"In NVFP4 linear, the (?:weight global scale is different for parallel layers|global weight scale "
        r"differs "
        r"across parallel layers|global scale for weight are different for parallel layers)",
        "NVFP4 layers that run as one (q, k and v; gate and up) have different outer weight scales.",
        _ONE_SCALE,
        _REPAIR,
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "fused-input-scales-differ",
        "warning",
        VLLM,
        ("input", "activation"),
        r"In (?:NVFP4|FP8) linear, the (?:input global scale is different for parallel layers|"
        r"(?:global|static) input scale differs across parallel layers|activation global scale for inputs "
        r"are different)",
        "Layers that run as one have different static input scales; the engine takes the largest.",
        "Inputs of the other parts use less of their range: usually a small loss, large when the ratio is "
        "large.",
        "`narrowcast audit MODEL` gives the ratios; calibrate fused layers together.",
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "expert-scales-differ",
        "error",
        VLLM,
        ("must",),
        r"w1_weight_(?:scale_2|global_scale) must match w3_weight_(?:scale_2|global_scale)",
        "gate and up of experts have different outer weight scales.",
        _ONE_SCALE,
        _REPAIR,
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "expert-input-scales-differ",
        "info",
        VLLM,
        ("input_scales",),
        r"Found input_scales that are not equal for (?P<what>.+?)\. Using the maximum",
        "Experts have different static input scales; the largest is used for all.",
        "Experts that see smaller inputs use less of the range. Expected where experts were calibrated one "
        "by one.",
        "`narrowcast audit MODEL` tells whether one expert's scale is far off.",
        _QUANT + "utils/fp8_utils.py",
    ),
    Complaint(
        "negative-scales",
        "error",
        VLLM,
        ("negative",),
        r"NVFP4 Marlin assumes the scales to be >=0, but has encountered negative scales",
        "The checkpoint has negative NVFP4 block scales.",
        "Marlin drops the sign of scales: those blocks get the wrong sign.",
        "`narrowcast audit MODEL` lists them; no quantizer should write them, so quantize the parent again.",
        _QUANT + "utils/marlin_utils_fp4.py",
    ),
    Complaint(
        "input-scale-dropped",
        "info",
        VLLM,
        ("Dropping",),
        r"Dropping input_scale from a weight-only W4A16 NVFP4",
        "The input scales of a weight-only file are not used.",
        "None: a weight-only kernel needs none.",
        "Nothing.",
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "requantized",
        "warning",
        VLLM,
        ("Requantizing",),
        r"Requantizing .* This conversion is lossy",
        "Experts are decoded and quantized again to int4 when they are loaded.",
        "A second rounding: the accuracy is not that of the file.",
        "Drop int4_per_group_32 from --quantization-config where accuracy matters.",
        _QUANT + "mxfp4.py",
    ),
    Complaint(
        "ue8m0-off",
        "warning",
        VLLM,
        ("UE8M0",),
        r"Model config requests UE8M0 .*but VLLM_USE_DEEP_GEMM_E8M0=0 is set",
        "The model wants power-of-two activation scales and the environment switches them off.",
        "Inputs are rounded otherwise than in training; a small, systematic difference.",
        "Unset VLLM_USE_DEEP_GEMM_E8M0.",
        "vLLM 0.32 transformers_utils/config.py",
    ),
)

_DTYPES = (
    Complaint(
        "cast-to-fp16",
        "warning",
        (*VLLM, *SGLANG),
        ("Casting",),
        r"Casting torch\.bfloat16 to torch\.float16",
        "A bf16 model computes in fp16.",
        "fp16 ends at 65504 where bf16 ends at 3.4e38: activations of some families overflow to infinity, "
        "then NaN, "
        "which prints as a row of exclamation marks. Small values lose bits below 6e-5.",
        "--dtype bfloat16, unless the kernel takes fp16 only; `narrowcast audit MODEL` knows the families.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "cast-to-bf16",
        "info",
        (*VLLM, *SGLANG),
        ("Casting",),
        r"Casting torch\.float16 to torch\.bfloat16",
        "An fp16 model computes in bf16.",
        "Safe against overflow; weights lose three of their eleven bits.",
        "--dtype float16 to keep them, if the model was trained in fp16.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "downcast",
        "info",
        (*VLLM, *SGLANG),
        ("Downcasting",),
        r"Downcasting torch\.float32 to torch\.(?P<dtype>\w+)",
        "The model's dtype is fp32 and it computes in {dtype}.",
        "The usual thing; where a config that should say bfloat16 says float32, or lacks the entry, the "
        "same happens.",
        "To float16 only on purpose: --dtype bfloat16 has no overflow.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "upcast",
        "warning",
        (*VLLM, *SGLANG),
        ("Upcasting",),
        r"Upcasting (?P<dtype>\S+) to torch\.float32",
        "The model computes in fp32.",
        "Twice the memory and a fraction of the speed; kernels for quantized weights mostly refuse fp32.",
        "Drop --dtype float32.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "no-bf16",
        "warning",
        VLLM,
        ("doesn",),
        r"Your device .* doesn't support torch\.bfloat16\. Falling back to torch\.float16",
        "This GPU has no bf16; the model computes in fp16.",
        "fp16 ends at 65504: activations of some families overflow to infinity, then NaN.",
        "--dtype float32 where the model fits, or a GPU of compute capability 8.0 and up.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "loaded-into-other-dtype",
        "info",
        VLLM,
        ("Attempted",),
        r"Attempted to load weight (?P<name>\S+) with dtype (?P<stored>\S+) into parameter with dtype "
        r"(?P<wanted>\S+)",
        "Tensors such as {name} are stored as {stored} and were converted to {wanted} while loading.",
        "Harmless for a cast that was asked for; for scales it rounds them, and to float16 small ones "
        "become zero.",
        "--dtype as in the file's config; `narrowcast audit MODEL` finds scales in the wrong dtype.",
        "vLLM 0.32 model_executor/models/utils.py",
    ),
    Complaint(
        "fp16-on-xpu",
        "info",
        VLLM,
        ("XPUW4A8IntLinearKernel",),
        r"XPUW4A8IntLinearKernel is running with model dtype (?P<dtype>\S+),",
        "The W4A8 kernel of this device writes fp16 while the model is {dtype}.",
        "One more rounding per layer, and overflow beyond 65504.",
        "--dtype float16, as the line recommends, if the family allows it.",
        "vLLM 0.32 model_executor/kernels/linear/mixed_precision/xpu.py",
    ),
)

_WEIGHTS = (
    Complaint(
        "weights-skipped",
        "warning",
        (*VLLM, *SGLANG),
        ("params_dict",),
        r"(?<![\w.])(?P<name>[\w.]+) (?:\(mapped to \S+\) )?not found in params_dict",
        "The checkpoint has tensors that the model has no place for, such as {name}; they are not loaded.",
        "Harmless for layers of another pipeline stage. Where names of scales or packed weights appear, the "
        "layer "
        "runs with what was there before: noise.",
        "`narrowcast inspect MODEL` and `narrowcast audit MODEL --for vllm` tell which names the engine "
        "reads.",
        "vLLM 0.32 model_executor/models/qwen3_next.py",
    ),
    Complaint(
        "tied-broken",
        "warning",
        VLLM,
        ("tied",),
        r"The config for (?P<model>\S+) says the word embeddings are tied, but the checkpoint contains a "
        r"different",
        "The config says tied embeddings and the checkpoint has an output head of its own.",
        "The engine takes the head that is stored; other engines tie and print noise.",
        "Set tie_word_embeddings to what the parent has; `narrowcast audit MODEL --against PARENT`.",
        _LOADER + "weight_tying.py",
    ),
    Complaint(
        "online-fp8-deprecated",
        "info",
        VLLM,
        ("deprecated",),
        r"--quantization fp8 is deprecated for online quantization",
        "An unquantized checkpoint is rounded to FP8 while it loads.",
        "One scale per tensor and no calibration; the load needs the memory of the unquantized model.",
        "--quantization fp8_per_channel is finer; a file made once by `narrowcast quantize MODEL OUT "
        "--preset "
        "fp8_dynamic` loads faster and can be checked.",
        _LOADER + "weight_utils.py",
    ),
    Complaint(
        "fallback-transformers",
        "warning",
        VLLM,
        ("Transformers",),
        r"(?<!\S)(?P<model>\S+) has no vLLM implementation, falling back to Transformers implementation",
        "{model} runs through Transformers' code inside vLLM.",
        "Slower, and quantized layers are found by other names: ignore lists may not match.",
        "`narrowcast audit MODEL --for transformers`, and read the kernels that the log names.",
        _LOADER + "utils.py",
    ),
    Complaint(
        "attention-not-quantized",
        "info",
        VLLM,
        ("Skipping",),
        r"Skipping CompressedTensors config group for (?P<layer>\S+?)\. Attention quant is coupled",
        "The config group for {layer} is skipped: vLLM quantizes attention with the KV cache only.",
        "Attention follows --kv-cache-dtype and the KV scales, not this group.",
        "Use kv_cache_scheme in the config for the KV cache.",
        _QUANT + "compressed_tensors/compressed_tensors.py",
    ),
    Complaint(
        "quantization-deprecated",
        "warning",
        VLLM,
        ("deprecated",),
        r"The quantization method (?P<method>\S+) is deprecated and will be removed",
        "The engine is about to drop the container {method}.",
        "A later version will refuse the file.",
        "`narrowcast convert MODEL OUT --to compressed-tensors`.",
        "vLLM 0.32 config/model.py",
    ),
)

COMPLAINTS = (*_KV, *_FUSED, *_DTYPES, *_WEIGHTS)
