"""Symptoms in what the model writes."""

from __future__ import annotations

from narrowcast.doctor.symptom_rows import Cause, Symptom

_OVERFLOW = Cause(
    "fp16 overflows",
    "fp16 ends at 65504. One activation beyond it is infinite, the next norm makes the row NaN, and it "
    "stays NaN.",
    "`narrowcast doctor LOG` shows casts to float16; `narrowcast audit MODEL` knows the families that "
    "overflow",
    "--dtype bfloat16",
)
_BAD_SCALES = Cause(
    "scales that are no numbers, zero or missing",
    "A NaN or zero scale spoils its block in every call; a missing one is whatever the loader put there.",
    "`narrowcast audit MODEL`",
    "quantize again; all-zero blocks and experts without calibration data are where quantizers divide by "
    "zero",
)
_WRONG_DECODING = Cause(
    "codes read in the wrong order or with the wrong scale",
    "Swapped nibbles, an inverted outer scale, a zero point off by one and transposed blocks all load "
    "without a word.",
    "`narrowcast compare PARENT MODEL`, which names the mistake; `narrowcast audit MODEL` without the parent",
    "convert again from the source with the mistake named; `narrowcast repair MODEL OUT` where one answer "
    "is right",
)
_KV_SCALE = Cause(
    "FP8 KV cache with scale 1.0",
    "Keys beyond 448 are clipped and each further token reads more of them. Models without QK norm suffer "
    "most.",
    "`narrowcast doctor LOG` (kv-fp8-without-scales, kv-fp8-unquantized, kv-scale-one, kv-scale-missing); the same "
    "prompt with --kv-cache-dtype bfloat16",
    "calibrated k_scale and v_scale (`narrowcast calibrate-kv`), or --kv-cache-dtype bfloat16, or fp8_per_token_head "
    "on vLLM",
)
_FUSED = Cause(
    "fused layers with different outer scales",
    "q, k and v (gate and up) run as one matrix with one outer scale; engines take the largest and warn "
    "once.",
    "`narrowcast doctor LOG` (fused-weight-scales-differ); `narrowcast audit MODEL` gives the ratios",
    "`narrowcast repair MODEL OUT`",
)
_LOST_SIDE_FILES = Cause(
    "a chat template or generation config that was lost",
    "Without the template the model sees a prompt it was not trained on; without its stop tokens it cannot "
    "end.",
    "`narrowcast audit MODEL --against PARENT` lists side files that are missing or differ",
    "copy chat_template.jinja, generation_config.json and the tokenizer from the parent",
)
_NOT_LOADED = Cause(
    "a layer that was not loaded",
    "Names that the engine does not expect are skipped, and the layer keeps what was in memory.",
    "`narrowcast doctor LOG` (weights-skipped, weights-uninitialized); `narrowcast audit MODEL --for vllm`",
    "`narrowcast repair MODEL OUT`, or convert to a container that the engine reads",
)
_KERNEL = Cause(
    "the kernel",
    "If the file decodes to the right numbers, the engine's arithmetic is what is left.",
    "`narrowcast compare PARENT MODEL --min-sqnr 18`; then another --linear-backend, --moe-backend or "
    "--attention-backend, and --enforce-eager",
    "the backend that works, and a report to the engine with the kernel that `narrowcast doctor LOG` names",
)
_ROUTER = Cause(
    "a router or norm that was narrowed",
    "Routers choose experts by small differences; rounded to few bits they choose others.",
    "`narrowcast audit MODEL --against PARENT`: router quantized, dtype of unquantized tensors changed",
    "keep router, norms and correction biases as in the parent: narrowcast's presets do",
)

TEXT = (
    Symptom(
        "nan",
        "NaN or infinite logits, at once or after some hundred tokens",
        "inf infinity infinite logits probability tensor hundred tokens sampling crash nans",
        (
            _OVERFLOW,
            _BAD_SCALES,
            Cause(
                "static input scales from too little data",
                "Inputs beyond the calibrated range saturate; a cast without saturation makes them NaN. "
                "Rare tokens "
                "and long answers reach such inputs late.",
                "`narrowcast audit MODEL` (static input scales that clip); the same prompt with a dynamic "
                "file",
                "fp8_dynamic in place of fp8, or calibration data like the real prompts",
            ),
            Cause(
                "NaN in the parent or in the quantized codes",
                "0x7F is NaN in E4M3 and a cast that does not saturate writes it.",
                "`narrowcast audit MODEL` gives tensor and coordinates",
                "quantize again from a clean parent; `narrowcast quantize` refuses NaN and says where it is",
            ),
            _KV_SCALE,
            _KERNEL,
        ),
    ),
    Symptom(
        "exclamation-marks",
        "nothing but exclamation marks, or one special token, for ever",
        "exclamation !!!! mark token zero 0 reserved special endless same",
        (
            Cause(
                "NaN logits",
                "Among NaNs greedy decoding takes the first entry, and token 0 is ! in many vocabularies.",
                "ask for logprobs: NaN or null confirms it; then `narrowcast doctor --symptom nan`",
                "that of the cause found there",
            ),
            _OVERFLOW,
            _NOT_LOADED,
            _BAD_SCALES,
            Cause(
                "GPUs that do not hear each other",
                "A broken peer-to-peer path delivers zeros or noise; the bf16 model fails alike.",
                "the bf16 parent with the same --tensor-parallel-size; then --disable-custom-all-reduce, "
                "NCCL_P2P_DISABLE=1",
                "keep the switch that helps; it is the machine, not the file",
            ),
        ),
    ),
    Symptom(
        "question-marks",
        "nothing but question marks, or characters that are no letters",
        "question ???? mark replacement character symbols mojibake",
        (
            Cause(
                "quantized embeddings of a tied model",
                "With tied embeddings an ignored lm_head is no tensor: the quantizer narrowed the "
                "embedding, or the "
                "engine reads codes as numbers.",
                "`narrowcast audit MODEL --against PARENT` (lm_head or embeddings quantized, tied heads "
                "broken)",
                "keep the embedding: narrowcast's presets do",
            ),
            Cause(
                "another tokenizer",
                "Right tokens, shown with the wrong vocabulary.",
                "`narrowcast audit MODEL --against PARENT` (side files that differ)",
                "copy the tokenizer from the parent",
            ),
            _KV_SCALE,
            _WRONG_DECODING,
        ),
    ),
    Symptom(
        "fluent-nonsense",
        "fluent text that makes no sense",
        "fluent nonsense sense wrong answers hallucinates meaningless gibberish incoherent plausible",
        (
            _FUSED,
            _WRONG_DECODING,
            Cause(
                "scales of the wrong dtype or rounded again",
                "Scales cast to fp16 underflow, block scales rounded to powers of two after the codes were "
                "made shift "
                "whole blocks by up to a factor of 1.4.",
                "`narrowcast audit MODEL`; `narrowcast doctor LOG` (scales-rounded-at-load, "
                "loaded-into-other-dtype)",
                "round the scale first, then quantize with it: `narrowcast quantize` does",
            ),
            _NOT_LOADED,
            _ROUTER,
            _LOST_SIDE_FILES,
        ),
    ),
    Symptom(
        "noise",
        "random tokens of all languages from the first word on",
        "noise garbage random gibberish salad languages mixed broken from start",
        (
            _WRONG_DECODING,
            _NOT_LOADED,
            Cause(
                "the engine does not know that the file is quantized",
                "Without quantization_config, codes are read as numbers.",
                "`narrowcast doctor LOG` (quantization: none); `narrowcast inspect MODEL`",
                "`narrowcast repair MODEL OUT` rebuilds the config from the tensors",
            ),
            _KERNEL,
        ),
    ),
    Symptom(
        "long-prompts",
        "right for short prompts, wrong for long ones",
        "long prompt context length degrade needle retrieval short fine 8k 32k beyond kv cache",
        (
            _KV_SCALE,
            Cause(
                "FP8 attention without calibrated scales of queries and probabilities",
                "Rounding errors of the attention sum grow with the number of keys.",
                "`narrowcast doctor LOG` (attention-uncalibrated); the same prompt with --kv-cache-dtype "
                "auto",
                "--kv-cache-dtype bfloat16; for hybrid models --kv-cache-dtype-skip-layers sliding_window",
            ),
            Cause(
                "rope scaling that was lost",
                "A config without rope_scaling or with another rope_theta is right for short prompts only.",
                "`narrowcast audit MODEL --against PARENT` (config differs)",
                "copy the entries from the parent's config.json",
            ),
            Cause(
                "calibration with short texts",
                "Static input scales saw no inputs of late positions.",
                "the same prompt with a dynamic file (fp8_dynamic)",
                "dynamic inputs, or calibrate with texts as long as the real ones",
            ),
        ),
    ),
    Symptom(
        "drift",
        "the first tokens are right, then the text drifts away",
        "drift first tokens right later wrong diverge degrade gradually decode prefill nonsense after hundred",
        (
            _KV_SCALE,
            Cause(
                "decode runs in another kernel than the prompt",
                "The first token comes from the prefill kernel; small batches use another one, and other "
                "scales.",
                "--enforce-eager, then another --attention-backend; logprobs of the same text as prompt and "
                "as answer",
                "the backend that works, and a report to the engine",
            ),
            Cause(
                "nothing: two right answers that part",
                "Greedy decoding turns a difference of 0.01 nat at a tie into another text.",
                "compare logprobs up to the first different token, and scores over many prompts, not single "
                "texts",
                "none needed when the scores are the parent's within noise",
            ),
            _OVERFLOW,
        ),
    ),
    Symptom(
        "repeats",
        "repeats itself or never ends",
        "repeat repeating repetition loop loops endless stop eos never ends",
        (
            _LOST_SIDE_FILES,
            _KV_SCALE,
            Cause(
                "too few bits for this model",
                "Small and reasoning models fall into loops first: the probabilities of the most likely "
                "tokens grow.",
                "`narrowcast compare PARENT MODEL`: is the loss what the format costs? Then it is the format",
                "a finer group (w4a16 with g64 or g32), 8 bits, or keep down_proj and o_proj wide",
            ),
            _FUSED,
        ),
    ),
    Symptom(
        "worse-scores",
        "scores below those that are published",
        "score scores accuracy benchmark lower published worse gsm8k mmlu evaluation eval drop quality",
        (
            Cause(
                "the comparison",
                "Another prompt template, few-shot count, sampling or engine moves scores more than a good "
                "format does; "
                "with 1000 questions two points are noise.",
                "the bf16 parent in the same engine with the same command",
                "compare with the parent, paired, and not with the paper",
            ),
            Cause(
                "a loss that the format cannot cause",
                "What is far below the format's own error is a bug and no quantization.",
                "`narrowcast audit MODEL --against PARENT`: SQNR beside what the scheme can do",
                "that of the mistake which it names",
            ),
            _KV_SCALE,
            _ROUTER,
            Cause(
                "more was quantized than was meant",
                "A pattern that matches too much takes lm_head, router, vision or MTP layers along.",
                "`narrowcast inspect MODEL`; `narrowcast audit MODEL` (coverage)",
                "an ignore list that the tool shows to match",
            ),
            _LOST_SIDE_FILES,
        ),
    ),
    Symptom(
        "vision",
        "text is right, images or sound are not understood",
        "vision image images video picture audio multimodal vl visual ocr blind",
        (
            Cause(
                "the tower was quantized",
                "A pattern such as re:visual.* matches nothing when names begin with model.visual.",
                "`narrowcast inspect MODEL`: formats by role; `narrowcast audit MODEL` (patterns that match "
                "nothing)",
                "ignore re:.*visual.* (or vision_tower) and quantize again: narrowcast's presets keep towers",
            ),
            Cause(
                "the engine thinks that the tower is quantized, or not",
                "Ignore lists name q, k and v where the engine has one fused qkv, or older names of the "
                "modules.",
                "`narrowcast audit MODEL --for vllm`; `narrowcast doctor LOG` (weights-skipped)",
                "`narrowcast repair MODEL OUT` rebuilds ignore lists from the tensors",
            ),
            Cause(
                "tensors or processor files that were dropped",
                "Text-only loaders lose the tower, its projector or preprocessor_config.json.",
                "`narrowcast audit MODEL --against PARENT`",
                "copy what is missing from the parent",
            ),
        ),
    ),
    Symptom(
        "experts",
        "a mixture of experts that is worse than dense models of the same format",
        "moe experts expert mixture router routing sparse",
        (
            _ROUTER,
            Cause(
                "experts that saw no calibration data",
                "An expert without tokens has no input scale, or one from noise.",
                "`narrowcast audit MODEL` lists layer and expert",
                "more calibration data, all experts calibrated, or a scheme without static inputs",
            ),
            Cause(
                "experts that were skipped",
                "Stacked 3-D experts are not Linear modules: tools leave them, the file is hardly smaller.",
                "`narrowcast inspect MODEL`: quantized share",
                "`narrowcast quantize`, which cuts stacks into experts",
            ),
            _FUSED,
        ),
    ),
)
