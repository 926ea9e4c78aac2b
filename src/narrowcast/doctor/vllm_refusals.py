"""vLLM's refusals: lines after which it does not start, or starts without a part of the model."""

from __future__ import annotations

from narrowcast.doctor.rows import SGLANG, VLLM, Complaint

_QUANT = "vLLM 0.32 model_executor/layers/quantization/"
_AUDIT = (
    "`narrowcast audit MODEL --for vllm --gpu NAME` tells beforehand which engines and GPUs take the file"
)

COMPLAINTS = (
    Complaint(
        "no-kernel",
        "error",
        VLLM,
        ("Failed", "Forced"),
        r"Forced NVFP4 kernel (?P<kernel>\w+) is not supported|Failed to find a kernel that can implement "
        r"the (?P<layer>\S+) linear layer\. Reasons:",
        "No kernel takes the quantized layers on this machine.",
        "The model does not start. Each kernel's reason follows.",
        f"{_AUDIT}. Reasons about shapes often go away with a smaller --tensor-parallel-size, reasons about "
        f"--dtype "
        "with another one, reasons about capability only with another GPU or format.",
        "vLLM 0.32 model_executor/kernels/linear/__init__.py",
        follow=r"^\s*(?:- )?(?P<detail>\w*(?:Kernel|Linear)\w*\W.+)",
    ),
    Complaint(
        "no-expert-kernel",
        "error",
        VLLM,
        ("MoE",),
        r"No (?P<scheme>[\w ]+?) MoE backends? (?:supports the deployment configuration|available)",
        "No {scheme} expert kernel takes this model on this machine.",
        "The model does not start.",
        f"VLLM_LOGGING_LEVEL=DEBUG prints why each was refused. {_AUDIT}.",
        "vLLM 0.32 model_executor/layers/fused_moe/oracle/fp8.py",
    ),
    Complaint(
        "no-attention",
        "error",
        VLLM,
        ("attention",),
        r"No valid attention backend found for (?P<device>.+?) with ",
        "No attention backend takes this combination of head size, dtype and KV cache dtype.",
        "The model does not start. The line gives each backend's reason.",
        "Try --kv-cache-dtype bfloat16 first; then --attention-backend and --block-size without a value of your "
        "own.",
        "vLLM 0.32 platforms/cuda.py",
    ),
    Complaint(
        "capability",
        "error",
        VLLM,
        ("current",),
        r"(?:quantization method (?P<method>\S+) is|Quantization scheme is) not supported for the current "
        r"GPU",
        "This GPU is too old for the file's quantization.",
        "The model does not start. The line names the compute capability that is wanted.",
        f"{_AUDIT}; w4a16 and int8 files run from capability 7.5 on.",
        "vLLM 0.32 config/vllm.py",
    ),
    Complaint(
        "dtype-refused",
        "error",
        VLLM,
        ("Supported",),
        r"torch\.(?P<dtype>\w+) is not supported for quantization method (?P<method>\S+)\. Supported dtypes",
        "{method} does not compute in {dtype}.",
        "The model does not start.",
        "Give one of the dtypes of the line as --dtype.",
        "vLLM 0.32 config/vllm.py",
    ),
    Complaint(
        "family-needs-bf16",
        "error",
        VLLM,
        ("float16",),
        r"The model type '(?P<family>[^']+)' does not support float16",
        "{family} overflows in fp16 and the engine refuses it.",
        "The model does not start.",
        "--dtype bfloat16.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "method-differs",
        "error",
        VLLM,
        ("match", "does"),
        r"Quantization method specified in the model config \((?P<file>[^)]+)\) does not match the "
        r"quantization "
        r"method specified in the `quantization` argument \((?P<asked>[^)]+)\)",
        "The file is {file} and --quantization says {asked}.",
        "The model does not start.",
        "Drop --quantization: the engine reads it from the file.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "method-unknown",
        "error",
        (*VLLM, *SGLANG),
        ("Unknown", "Invalid"),
        r"(?:Unknown|Invalid) quantization method: (?P<method>\S+?)\.? ?",
        "The engine does not know the quantization method {method}.",
        "The model does not start.",
        "`narrowcast inspect MODEL` names the container; `narrowcast convert MODEL OUT --to "
        "compressed-tensors` "
        "moves it into one that is read everywhere.",
        "vLLM 0.32 config/model.py",
    ),
    Complaint(
        "fused-mixed",
        "error",
        VLLM,
        ("shards",),
        r"Detected some but not all shards of (?P<layer>\S+) are quantized",
        "Some parts of the fused layer {layer} are quantized and some are not.",
        "The model does not start: a fused layer has one scheme.",
        "Ignore all parts or none (q_proj, k_proj and v_proj; gate_proj and up_proj) and quantize again.",
        _QUANT + "utils/quant_utils.py",
    ),
    Complaint(
        "not-aligned",
        "error",
        (*VLLM, *SGLANG),
        ("aligned",),
        r"The (?P<side>input|output) size is not aligned with the quantized weight shape",
        "After splitting over GPUs a layer no longer consists of whole groups.",
        "The model does not start.",
        "`narrowcast audit MODEL --tp N` lists the sizes that work; else a smaller --tensor-parallel-size, "
        "or a "
        "smaller group size.",
        _QUANT + "auto_awq.py",
    ),
    Complaint(
        "block-not-divisible",
        "error",
        (*VLLM, *SGLANG),
        ("divisible",),
        r"[Ww]eight (?:in|out)put_(?:size|partition)\w*\s?=?\s?(?P<size>\d+) is not divisible by weight "
        r"quantization "
        r"block_(?:n|k)\s?=?\s?(?P<block>\d+)|"
        r"requires (?:in|input size|hidden_size|\w*_per_partition)(?: \(\d+\))?(?: to be)? divisible by",
        "A dimension, perhaps after splitting over GPUs, is no multiple of the block.",
        "The model does not start.",
        "`narrowcast audit MODEL --tp N` lists the sizes that work; experts stay whole with "
        "--enable-expert-parallel.",
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "weights-missing",
        "error",
        VLLM,
        ("initialized",),
        r"[Ww]eights were not initialized from checkpoint: (?P<names>.{1,80})",
        "The checkpoint lacks tensors that the model needs, such as {names}",
        "The model does not start; older versions started with noise in them.",
        "`narrowcast audit MODEL --against PARENT`: a wrong ignore list, a dropped tensor or a missing "
        "shard.",
        "vLLM 0.32 model_executor/model_loader/default_loader.py",
    ),
    Complaint(
        "weight-unknown",
        "error",
        VLLM,
        ("module",),
        r"There is no module or parameter named '?(?P<name>[^' ]+)'? in (?P<model>\w+)",
        "The checkpoint has {name}, and {model} has no such parameter.",
        "The model does not start. Scales of a layer that the config does not list as quantized end like "
        "this.",
        "`narrowcast audit MODEL --for vllm` compares the config with the tensors, in both directions.",
        "vLLM 0.32 model_executor/models/utils.py",
    ),
    Complaint(
        "weight-key-error",
        "error",
        (*VLLM, *SGLANG),
        ("KeyError",),
        r"KeyError: '(?P<name>[\w.]*(?:weight|scale|zero|qweight|g_idx|input|bias)[\w.]*)'",
        "The loader found {name}, which the model does not have.",
        "The model does not start. Most often the config does not list as quantized what the tensors show.",
        "`narrowcast audit MODEL --for vllm` compares the config with the tensors, in both directions.",
        "vLLM 0.8 model_executor/models/llama.py",
    ),
    Complaint(
        "scale-never-loaded",
        "error",
        VLLM,
        ("never",),
        r"NVFP4 weight_scale for layer (?P<layer>\S+) was never loaded",
        "The config says that {layer} is NVFP4 and the file has no scales for it.",
        "The model does not start.",
        "Put the layer on the ignore list; `narrowcast repair MODEL OUT` rebuilds it from the tensors.",
        _QUANT + "modelopt.py",
    ),
    Complaint(
        "shard-missing",
        "error",
        VLLM,
        ("referenced", "Cannot"),
        r"Weight files referenced in index but missing|Cannot find any model weights with",
        "Files of the checkpoint are missing.",
        "The model does not start.",
        "Download again; `narrowcast inspect MODEL` checks index against files.",
        "vLLM 0.32 model_executor/model_loader/weight_utils.py",
    ),
    Complaint(
        "online-fp8-gone",
        "error",
        VLLM,
        ("online",),
        r"The `fp8` quantization method no longer supports online quantization",
        "--quantization fp8 was given for a checkpoint that is not FP8.",
        "The model does not start.",
        "--quantization fp8_per_tensor or fp8_per_channel; or make the file: `narrowcast quantize MODEL OUT "
        "--preset "
        "fp8_dynamic`.",
        _QUANT + "fp8.py",
    ),
    Complaint(
        "online-without-kernel",
        "error",
        VLLM,
        ("online",),
        r"FP8 PTPC online quant requires a kernel that honors|nvfp4_per_token online quantization requires a Blackwell",
        "This GPU has no kernel for what --quantization would make while loading.",
        "The model does not start.",
        "`narrowcast plan MODEL --gpu NAME` says which presets run here.",
        _QUANT + "online/fp8.py",
    ),
    Complaint(
        "kv-not-scalar",
        "error",
        VLLM,
        ("scaling", "scalar"),
        r"Only support per-tensor scaling factor ?for (?P<what>fp8 KV cache|fp8-quantized)|KV-cache scale "
        r"expects a scalar",
        "The KV scales of the file are not one number per layer.",
        "The model does not start.",
        "Calibrate one k_scale and one v_scale per layer, or --kv-cache-dtype bfloat16.",
        _QUANT + "kv_cache.py",
    ),
    Complaint(
        "kv-e5m2-refused",
        "error",
        VLLM,
        ("fp8_e5m2",),
        r"fp8_e5m2 kv-cache is not supported with fp8 checkpoints",
        "--kv-cache-dtype fp8_e5m2 does not go with an FP8 checkpoint.",
        "The model does not start.",
        "--kv-cache-dtype fp8, with scales in the checkpoint, or auto.",
        "vLLM 0.32 model_executor/layers/attention/attention.py",
    ),
    Complaint(
        "kv-nvfp4-latent",
        "error",
        VLLM,
        ("nvfp4",),
        r"nvfp4 KV cache is not supported with MLA",
        "Latents of this model are not stored in NVFP4.",
        "The model does not start.",
        "--kv-cache-dtype fp8, or nvfp4_ds_mla where attention is sparse.",
        "vLLM 0.32 config/vllm.py",
    ),
    Complaint(
        "kv-fp8-capability",
        "error",
        VLLM,
        ("FP8",),
        r"FP8 KV cache is not supported by the Triton attention backend on|FP8 KV cache on CPU requires|"
        r"FP8 KV cache requires head_size divisible",
        "This device has no FP8 KV cache.",
        "The model does not start.",
        "--kv-cache-dtype bfloat16, or on Ampere fp8_e5m2 where the file has no FP8 weights.",
        "vLLM 0.32 v1/attention/backends/triton_attn.py",
    ),
)
