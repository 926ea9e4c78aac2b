"""Rules about the keys of a quantization config: what engines ask for, what is mistyped, and what says too much."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from narrowcast.audit.config_said import beside, method
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject

_SCHEME = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_ARGS = frozenset({
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
})  # fmt: skip
# Keys at the top of a block that change what a reader does, by method; what quantizers note for themselves is left out.
_KNOWN: dict[str, frozenset[str]] = {
    "compressed-tensors": frozenset({
        "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status", "sparsity_config",
        "transform_config", "global_compression_ratio", "moe_sparsity_config", "version",
    }),
    "fp8": frozenset({
        "activation_scheme", "weight_block_size", "ignored_layers", "modules_to_not_convert", "modules_to_convert",
        "scale_fmt", "fmt", "expert_dtype", "store_dtype", "dequantize", "kv_cache_scheme",
    }),
    "modelopt": frozenset({
        "quant_algo", "ignore", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "quantized_layers",
        "config_groups", "group_size", "producer",
    }),
    "gptq": frozenset({
        "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "method", "lm_head", "dynamic", "meta",
        "pack_dtype", "static_groups", "true_sequential", "modules_in_block_to_quantize", "damp_percent",
    }),
    "awq": frozenset({
        "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "modules_to_not_convert", "lm_head",
        "format", "checkpoint_format", "desc_act", "sym", "method", "meta", "pack_dtype",
    }),
    "quark": frozenset({
        "global_quant_config", "exclude", "algo_config", "softmax_quant_spec", "layer_type_quant_config", "version",
        "layer_quant_config", "kv_cache_quant_config", "kv_cache_post_rope", "quant_mode", "export",
    }),
    "auto-round": frozenset({
        "bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "act_group_size", "act_sym",
        "act_dynamic", "packing_format", "block_name_to_quantize", "to_quant_block_names", "extra_config", "backend",
        "vllm_backend", "activation_scheme", "fmt", "weight_block_size",
    }),
    "fbgemm-fp8": frozenset({"activation_scale_ub", "modules_to_not_convert"}),
    "mxfp4": frozenset({"modules_to_not_convert"}),
}  # fmt: skip


@rule("NC540", "warning")
def unknown_key(subject: Subject) -> Iterator[Finding]:
    """A key of the quantization config is not one that readers know, and is close to one.

    What: A mistyped key, such as ``ignored_layer``; or, inside a config group of compressed-tensors, any other key.
    Why: A mistyped key is passed over in silence, with what it should have said. Groups are read strictly: another key
    stops the loading.
    Fix: Correct the key.
    False alarm: A key that an extension of the library reads.
    """
    by, block = method(subject), subject.quantization
    known = _KNOWN.get(by, frozenset())
    for key in block:
        near = difflib.get_close_matches(key, known - block.keys(), 1, 0.85) if key not in known else []
        if near and key != "quant_method":
            yield Finding(
                f"the key {key!r} is not known, and {near[0]!r} is", tensor="config.json", got=key, wanted=near[0],
                remedy=f"write {near[0]!r}, if it was meant", repair="config",
            )  # fmt: skip
    if by == "compressed-tensors":
        for where, key, wanted in _strict(block):
            yield Finding(
                f"{where} has the key {key!r}, and compressed-tensors reads it strictly", severity="error",
                tensor="config.json", got=key, wanted=wanted, remedy="remove the key", repair="config",
            )  # fmt: skip


def _strict(block: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys that are none, in groups and arguments."""
    parts: list[tuple[str, Any, frozenset[str]]] = [("kv_cache_scheme", block.get("kv_cache_scheme"), _ARGS)]
    groups = block.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            parts.append((str(name), group, _SCHEME))
            parts += [(f"{name}.{key}", group.get(key), _ARGS) for key in ("weights", "input_activations")]
    for where, part, known in parts:
        for key in sorted(set(part) - known) if isinstance(part, Mapping) else ():
            near = difflib.get_close_matches(key, known, 1, 0.6)
            yield where, key, near[0] if near else f"one of {', '.join(sorted(known))}"


_FP8_BLOCKS = (
    "act_bits",
    "act_group_size",
    "act_data_type",
    "act_sym",
    "act_dynamic",
    "activation_scheme",
    "fmt",
)
_MXFP8 = ("act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic")


def _asked(by: str, block: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Keys that readers of a method ask for; one of each tuple is enough."""
    if by == "compressed-tensors":
        yield from (("quant_method",), ("format",), ("config_groups",))
    elif by == "fp8":
        yield ("activation_scheme",)
    elif by == "gptq":
        yield from (("bits",), ("group_size",), ("desc_act",))
    elif by == "awq":
        yield from (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",))
    elif by == "quark":
        yield ("export",)
    elif by == "torchao":
        yield ("quant_type",)
    elif by == "auto-round":
        yield from (("bits",), ("group_size",), ("sym",))
        kind = str(block.get("data_type") or "int")
        if isinstance(block.get("group_size"), list):
            yield from ((key,) for key in _FP8_BLOCKS)
        elif "mx_fp" in kind and any(key in block for key in _MXFP8):  # none of them: inputs stay wide
            yield from ((key,) for key in _MXFP8)


@rule("NC541", "error")
def missing_key(subject: Subject) -> Iterator[Finding]:
    """The quantization config lacks a key that engines ask for.

    What: A key without which a reader of this method stops: activation_scheme of fp8, format of compressed-tensors,
    desc_act of gptq, export of Quark, the act_ keys of auto-round's FP8 blocks, group_size in hf_quant_config.json.
    Why: The engine refuses the checkpoint at start-up.
    Fix: Add the key; ``narrowcast repair`` rebuilds the block from the tensors.
    False alarm: A file beside config.json that your engine reads instead.
    """
    by, block = method(subject), dict(subject.quantization)
    files = beside(subject)
    if block:
        for name, file in files.items():
            block = {**file, **block} if name != "hf_quant_config.json" else block
        for keys in _asked(by, block):
            if not any(key in block for key in keys):
                yield _missing("config.json", " or ".join(keys), by)
    said = files.get("hf_quant_config.json", {}).get("quantization")
    if by == "modelopt" and isinstance(said, Mapping):
        wanted = {
            "NVFP4": ("group_size", "kv_cache_quant_algo", "exclude_modules"),
            "MXFP8": ("kv_cache_quant_algo", "exclude_modules"),
        }.get(str(said.get("quant_algo")).upper(), ())
        for key in wanted:
            if key not in said:
                yield _missing("hf_quant_config.json", key, by)


def _missing(file: str, key: str, by: str) -> Finding:
    return Finding(
        f"{by} has no {key}", tensor=file, got=f"no {key}", wanted=f"{key}, which engines ask for", repair="config",
        remedy="`narrowcast repair` rebuilds the block from the tensors",
    )  # fmt: skip


@rule("NC542", "error")
def status_before_compression(subject: Subject) -> Iterator[Finding]:
    """quantization_status says that the weights are not compressed, and they are.

    What: The status is frozen, calibration or another one before compressed, and the file holds codes.
    Why: transformers then builds plain layers, finds no weights for them, and leaves them random.
    Fix: Set it to compressed; ``narrowcast repair`` does.
    False alarm: vLLM does not look at it.
    """
    status = subject.quantization.get("quantization_status")
    if method(subject) != "compressed-tensors" or status in (None, "compressed"):
        return
    if any(layer.quantized for layer in subject.layers.values()):
        yield Finding(
            f"quantization_status is {status}, and the tensors are compressed", tensor="config.json", got=str(status),
            wanted="compressed", remedy="`narrowcast repair` sets it", repair="config",
        )  # fmt: skip


@rule("NC543", "error")
def cache_scheme_that_is_refused(subject: Subject) -> Iterator[Finding]:
    """kv_cache_scheme asks for a cache that engines do not have.

    What: The KV cache's arguments are other than eight bits of symmetric float for the tensor or for each head; or
    ModelOpt's word for it is unknown.
    Why: vLLM raises NotImplementedError; TensorRT-LLM drops a scheme that it does not know, and the cache stays wide.
    Fix: Ask for FP8 per tensor, and remove the scales of the other scheme.
    False alarm: An engine of your own that has such a cache.
    """
    block, by = subject.quantization, method(subject)
    scheme = block.get("kv_cache_scheme")
    if by == "compressed-tensors" and isinstance(scheme, Mapping):
        wanted = {
            "num_bits": (8,),
            "type": ("float",),
            "symmetric": (True,),
            "strategy": ("tensor", "attn_head"),
        }
        wrong = [key for key, fits in wanted.items() if scheme.get(key, fits[0]) not in fits]
        if "type" not in scheme:
            wrong.append("type")  # the library's default is int
        if wrong:
            yield Finding(
                f"kv_cache_scheme has {', '.join(f'{key} {scheme.get(key)}' for key in wrong)}", tensor="config.json",
                got=", ".join(f"{key} {scheme.get(key)}" for key in wrong), repair="config",
                wanted="8 bits, float, symmetric, strategy tensor or attn_head",
                remedy="`narrowcast quantize` with a preset that ends in +kv8 makes one that engines read",
            )  # fmt: skip
    if (
        by == "modelopt"
        and isinstance(scheme, str)
        and scheme.upper() not in ("FP8", "NVFP4", "INT8", "NVFP4_AFFINE")
    ):
        yield Finding(
            f"kv_cache_scheme {scheme!r} is not known", tensor="config.json", got=scheme, wanted="FP8, NVFP4 or INT8",
            remedy="write the algorithm that the cache scales are of", repair="config",
        )  # fmt: skip


_NEWEST = {"compressed-tensors": "0.20.1", "modelopt": "0.47.0", "auto-round": "0.16.1", "quark": "0.13"}


@rule("NC544", "info")
def newer_producer(subject: Subject) -> Iterator[Finding]:
    """The checkpoint was written by a newer version of its library than is known here.

    What: The version that the config names is above the one whose format was read for these rules.
    Why: Keys, layouts and defaults may have changed, and a rule may be silent or wrong about them.
    Fix: Look for a newer narrowcast.
    False alarm: A version that changed nothing of the format.
    """
    by, block = method(subject), subject.quantization
    producer = block.get("producer")
    said = {
        "compressed-tensors": block.get("version"), "quark": block.get("version"),
        "auto-round": block.get("autoround_version"),
        "modelopt": producer.get("version") if isinstance(producer, Mapping) else None,
    }.get(by)  # fmt: skip
    if said and by in _NEWEST and _numbers(str(said)) > _numbers(_NEWEST[by]):
        yield Finding(
            f"written by {by} {said}, and known here is {_NEWEST[by]}", tensor="config.json", got=str(said),
            wanted=f"{_NEWEST[by]} or older", remedy="look for a newer narrowcast",
        )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.20.1.dev3 is (0, 20, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
