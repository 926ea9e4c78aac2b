"""Symptoms around the model: it does not load, does not fit, is slow, or depends on machine and settings."""

from __future__ import annotations

from narrowcast.doctor.symptom_rows import Cause, Symptom

LOADING = (
    Symptom(
        "slow",
        "no faster than bf16, or slower",
        "slower slow speed throughput latency performance bf16 faster tokens second",
        (
            Cause(
                "arithmetic is 16 bit",
                "Weight-only formats (w4a16, and FP8 or FP4 on GPUs without such units) read less memory "
                "and compute as "
                "before: they gain for small batches and lose for large ones.",
                "`narrowcast doctor LOG` (weight-only-fp8, weight-only-fp4, linear kernel)",
                "for large batches a format that the GPU multiplies: fp8_dynamic from capability 8.9, int8 "
                "from 7.5",
            ),
            Cause(
                "emulation or an unoptimized kernel",
                "Software decodes in every call.",
                "`narrowcast doctor LOG` (emulated-nvfp4, unoptimized-awq, not-optimized)",
                "a format that this GPU has, or another engine version",
            ),
            Cause(
                "eager mode or a tiny model",
                "Launch overhead hides what a format saves.",
                "`narrowcast doctor LOG` (eager); a batch of 1 and of 64 with the same prompt",
                "drop --enforce-eager; measure the model that will be served",
            ),
            Cause(
                "little of the model is quantized",
                "Skipped experts or an ignore list that matches too much leave it bf16.",
                "`narrowcast inspect MODEL`: quantized share of parameters and bytes",
                "correct the patterns and quantize again",
            ),
            Cause(
                "kernels that are not tuned for these shapes",
                "Triton kernels run with a default configuration.",
                "`narrowcast doctor LOG` (untuned)",
                "another backend, or the engine's tuning script",
            ),
            Cause(
                "the KV cache, not the weights",
                "With long contexts most of the traffic is keys and values.",
                "tokens per second with prompts of 100 and of 10000 tokens",
                "an FP8 KV cache with calibrated scales",
            ),
        ),
    ),
    Symptom(
        "out-of-memory",
        "out of memory, at start or under load",
        "oom cuda memory out fit does killed allocation",
        (
            Cause(
                "the KV cache and the longest prompt",
                "Engines reserve one request of the full length at start.",
                "`narrowcast doctor LOG` (kv-too-small, KV cache size)",
                "--max-model-len, --max-num-seqs; SGLang --context-length; an FP8 KV cache",
            ),
            Cause(
                "graphs and workspaces outside the budget",
                "CUDA graphs and kernel workspaces come on top of the reserved share.",
                "`narrowcast doctor LOG` (out-of-memory): at which step",
                "smaller --gpu-memory-utilization (vLLM), --mem-fraction-static (SGLang), "
                "free_gpu_memory_fraction "
                "(TensorRT-LLM)",
            ),
            Cause(
                "the weights are wider than thought",
                "Unquantized experts, embeddings and heads, or experts decoded to bf16 when they are loaded.",
                "`narrowcast inspect MODEL`: bytes by format; `narrowcast doctor LOG` (experts-widened)",
                "quantize what was left out, or another backend",
            ),
            Cause(
                "quantization while loading",
                "Online quantization needs the unquantized weights first.",
                "`narrowcast doctor LOG` (online-fp8-deprecated, online quantization)",
                "`narrowcast quantize MODEL OUT --preset fp8_dynamic` once, and serve the result",
            ),
            Cause(
                "somebody else's process",
                "What another process holds is missing at start.",
                "`narrowcast doctor LOG` (memory-taken); nvidia-smi",
                "end it, or reserve less",
            ),
        ),
    ),
    Symptom(
        "no-memory-gain",
        "hardly smaller than the unquantized model",
        "size smaller gain bigger disk large file shrink",
        (
            Cause(
                "experts or large layers were skipped",
                "Tools that look for Linear modules miss stacked experts.",
                "`narrowcast inspect MODEL`: quantized share and the largest tensors left",
                "`narrowcast quantize MODEL OUT --preset NAME --dry-run` shows what it will cover",
            ),
            Cause(
                "fake quantization was saved",
                "Rounded values in bf16 are as large as before.",
                "`narrowcast inspect MODEL`: dtypes of the weights",
                "export packed codes; from the parent `narrowcast quantize`",
            ),
            Cause(
                "embeddings and head dominate",
                "Small models with large vocabularies are half embedding.",
                "`narrowcast inspect MODEL`",
                "nothing, or GGUF types that narrow embeddings",
            ),
        ),
    ),
    Symptom(
        "load-error",
        "does not load: missing or unexpected keys, wrong sizes, unknown method",
        "load loading keyerror key keys missing unexpected error shape mismatch parameter module start crash",
        (
            Cause(
                "config and tensors disagree",
                "Layers that the config calls quantized have no scales, or the other way round.",
                "`narrowcast doctor LOG`; `narrowcast audit MODEL --for vllm`",
                "`narrowcast repair MODEL OUT` rebuilds the config from the tensors",
            ),
            Cause(
                "a container that this engine or version does not read",
                "Each engine reads some spellings of some schemes.",
                "`narrowcast audit MODEL --for vllm` (sglang, tensorrt-llm, transformers)",
                "`narrowcast convert MODEL OUT --to CONTAINER`, which moves codes bit for bit where it can",
            ),
            Cause(
                "a GPU that is too old for the scheme",
                "Schemes have a least compute capability.",
                "`narrowcast doctor LOG` (capability, no-kernel); `narrowcast audit MODEL --gpu NAME`",
                "w4a16 or int8, which run from capability 7.5 on",
            ),
            Cause(
                "a fused layer of which only a part is quantized",
                "q, k and v (gate and up) are one layer for the engine and have one scheme.",
                "`narrowcast doctor LOG` (fused-mixed); `narrowcast audit MODEL`",
                "ignore all parts or none",
            ),
            Cause(
                "an incomplete download",
                "Shards missing or truncated.",
                "`narrowcast inspect MODEL`",
                "download again",
            ),
        ),
    ),
    Symptom(
        "tensor-parallel",
        "wrong or refused only with several GPUs",
        "tp tensor parallel parallelism gpus gpu multi two sharding shard split tp2",
        (
            Cause(
                "shards that cut groups or blocks",
                "A dimension divided by the GPUs is no multiple of the group; some kernels refuse, some "
                "read the wrong "
                "scales.",
                "`narrowcast audit MODEL --tp N`",
                "a size that it lists, a smaller group (32 or 64), or --enable-expert-parallel",
            ),
            Cause(
                "GPUs that do not hear each other",
                "Peer-to-peer that is broken by virtualization or IOMMU fails for every model.",
                "the bf16 parent with the same --tensor-parallel-size",
                "--disable-custom-all-reduce, NCCL_P2P_DISABLE=1",
            ),
            Cause(
                "columns in another order",
                "GPTQ with desc_act spreads groups over shards.",
                "`narrowcast inspect MODEL`: g_idx present",
                "quantize without desc_act, or one GPU per model",
            ),
            Cause(
                "FP8 attention whose scales differ between shards",
                "Each GPU sees other heads.",
                "--kv-cache-dtype bfloat16 with the same --tensor-parallel-size",
                "calibrated scales, or keep auto",
            ),
        ),
    ),
    Symptom(
        "fp16",
        "wrong with fp16, right with bf16",
        "fp16 float16 half bf16 bfloat16 dtype t4 v100 volta turing",
        (
            Cause(
                "activations beyond 65504",
                "Families trained in bf16 (Gemma 2 and 3, GLM-4, T5 among them) exceed fp16's range.",
                "`narrowcast audit MODEL` knows the families; `narrowcast doctor LOG` (cast-to-fp16)",
                "--dtype bfloat16; on GPUs before Ampere --dtype float32, where it fits",
            ),
            Cause(
                "scales that underflow in fp16",
                "Scales below 6e-8 become zero and below 6e-5 lose bits: small weights, NVFP4's outer "
                "scales.",
                "`narrowcast audit MODEL` (scales: wrong dtype, subnormal)",
                "fp32 scales: `narrowcast convert MODEL OUT --to compressed-tensors`",
            ),
            Cause(
                "weights beyond 65504",
                "A buffer or weight that bf16 holds is infinite in fp16.",
                "`narrowcast audit MODEL` (bf16 values beyond fp16)",
                "--dtype bfloat16",
            ),
        ),
    ),
    Symptom(
        "one-engine",
        "right in one engine, wrong in another",
        "engine vllm sglang tensorrt transformers llama differs another works hf",
        (
            Cause(
                "two configs that disagree",
                "hf_quant_config.json, config.json and the tensors: engines believe different ones.",
                "`narrowcast audit MODEL --for` each of them; `narrowcast doctor LOG` (configs-diverge)",
                "`narrowcast repair MODEL OUT`",
            ),
            Cause(
                "spellings of the KV scales",
                "Names that one engine maps, another ignores: it uses 1.0.",
                "`narrowcast audit MODEL --for sglang`",
                "`narrowcast repair MODEL OUT`",
            ),
            Cause(
                "scales that are changed at load",
                "DeepGEMM rounds scales to powers of two, TensorRT-LLM recasts fused FP8 layers to one "
                "scale.",
                "`narrowcast doctor LOG` (scales-rounded-at-load, ue8m0-rounding)",
                "scales that need no change: fp8_block_ue8m0; one scale for fused layers",
            ),
            Cause(
                "GPTQ zero points, v1 against v2",
                "Stored zeros differ by one between them.",
                "`narrowcast audit MODEL` (off-by-one zero points)",
                "`narrowcast convert MODEL OUT --to gptq`",
            ),
        ),
    ),
    Symptom(
        "not-repeatable",
        "another answer in every run, or with another batch size",
        "deterministic nondeterministic random batch reproducible repeatable different run runs seed varies",
        (
            Cause(
                "sums in another order",
                "Kernels choose tiles by batch size, and floating-point sums depend on order: differences "
                "of some 0.01 nat.",
                "logprobs at temperature 0, batch 1 against batch 8, with the bf16 parent too",
                "VLLM_BATCH_INVARIANT=1 on vLLM, --enable-deterministic-inference on SGLang",
            ),
            Cause(
                "inputs scaled by what else is in the batch",
                "Dynamic scales per tensor see the whole batch; per token they do not.",
                "`narrowcast inspect MODEL`: how inputs are quantized",
                "per-token inputs (fp8_dynamic)",
            ),
            Cause(
                "memory that nobody wrote",
                "Weights that were not loaded differ from start to start.",
                "`narrowcast doctor LOG` (weights-uninitialized, weights-skipped)",
                "`narrowcast audit MODEL --for vllm`",
            ),
        ),
    ),
)
