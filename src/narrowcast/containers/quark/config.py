"""Quark's ``quantization_config``: a spec for each tensor of a layer, global, by name, and what is left out.

    global_quant_config     {weight, input_tensors, output_tensors, bias}: of every linear layer that is not named
    layer_quant_config      {name or glob: the same}, which comes first
    exclude                 names, globs and ``re:`` patterns of layers that are left alone
    export                  pack_method of integers, kv_cache_group; vLLM refuses a config without it

The largest group of layers is written as the global one and every other layer by its name. A KV cache is the output of
``*k_proj`` and ``*v_proj``: an entry of layer_quant_config for each, with output_tensors.

Source: amd-quark 0.13 (torch/quantization/config/config.py, its own to_dict), vLLM 0.32 (quantization/quark/quark.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from narrowcast.containers.container import Document, Layers
from narrowcast.containers.quark.spellings import NAME, QUARK
from narrowcast.numbers.formats import E8M0
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme

# The config schema that this file writes is the library's of this version.
VERSION = "0.13"
KV_GROUP = ("*k_proj", "*v_proj")
Spec = dict[str, Any]


def spec(dtype: str, qscheme: str, dynamic: bool, observer: str, **more: Any) -> Spec:
    """One QTensorConfig with the keys that the library serialises."""
    return {
        "dtype": dtype, "is_dynamic": dynamic, "qscheme": qscheme, "ch_axis": None, "group_size": None,
        "block_size": None, "symmetric": True, "round_method": "half_even", "scale_type": "float",
        "zero_point_type": "int32", "scale_format": None, "scale_calculation_mode": None, "mx_element_dtype": None,
        "observer_cls": observer, "is_scale_quant": False, "enable_buffer_reuse": False, "max_input_numel": 4194304,
    } | more  # fmt: skip


def specs(scheme: Scheme, dynamic: bool, weight: bool) -> Spec | list[Spec]:
    """A weight or an input as the library would say it; two levels are a list of two."""
    dtype, (rows, cols) = QUARK[scheme.element.name], scheme.inner.tile
    powers = scheme.inner.format is E8M0
    if len(scheme.scales) == 2:
        inner = _grouped(dtype, cols, dynamic or not weight, scale_type="float32", scale_format="float32")
        outer = spec("fp8_e4m3", "per_tensor", dynamic, "PerTensorMinMaxObserver", scale_type="float32")
        return [inner, outer | {"is_scale_quant": True}]
    if (rows, cols) == (0, 0):
        return spec(dtype, "per_tensor", dynamic, "PerTensorMinMaxObserver", scale_type=None)
    if rows > 1:
        scale = {"scale_type": "float8_e8m0fnu"} if powers else {}
        return spec(dtype, "per_block", dynamic, "PerBlockMXObserver", block_size=[rows, cols], **scale)
    if not cols:
        return spec(dtype, "per_channel", dynamic, "PerChannelMinMaxObserver", ch_axis=0 if weight else 1)
    if powers:
        return _grouped(dtype, cols, dynamic, scale_format="e8m0", scale_calculation_mode="even")
    if scheme.element.name in ("int4", "uint4"):
        symmetric = scheme.zero is None
        return spec(
            dtype,
            "per_group",
            dynamic,
            "PerGroupMinMaxObserver",
            ch_axis=-1,
            group_size=cols,
            symmetric=symmetric,
        )
    return _grouped(dtype, cols, dynamic, scale_format="float32", symmetric=True)


def _grouped(dtype: str, group: int, dynamic: bool, **more: Any) -> Spec:
    common: dict[str, Any] = {"ch_axis": -1, "group_size": group, "symmetric": None}
    return spec(dtype, "per_group", dynamic, "PerBlockMXObserver", **(common | more))


def layer(linear: LinearScheme | None, output: Spec | None = None) -> dict[str, Any]:
    """The config of one layer; None: nothing of it is quantized."""
    inputs = linear.input if linear is not None else None
    return {
        "input_tensors": specs(inputs, linear.dynamic, weight=False)
        if linear is not None and inputs
        else None,
        "output_tensors": output,
        "weight": None if linear is None else specs(linear.weight, False, weight=True),
        "bias": None,
        "target_device": None,
    }


def document(layers: Layers) -> Document:
    """The config block for groups of equal linear schemes."""
    groups = sorted(layers.groups, key=lambda group: -len(group.names))
    cache = (
        spec("fp8_e4m3", "per_tensor", False, "PerTensorMinMaxObserver", scale_type=None)
        if layers.kv
        else None
    )
    first = groups[0] if groups else None
    named = {
        name: layer(_stored(group.linear, group.how.scheme), cache if _of_cache(name) else None)
        for group in groups[1:]
        for name in group.names
    }
    everywhere = _stored(first.linear, first.how.scheme) if first else None
    if cache is not None:
        kept = set(layers.ignore)
        for pattern in KV_GROUP:
            wide = kept.issuperset(n for n in layers.linear_names if fnmatchcase(n, pattern))
            named[pattern] = layer(None if wide else everywhere, cache)
    group = list(KV_GROUP) if cache is not None else []
    block = {
        "global_quant_config": layer(everywhere),
        "exclude": [_glob(name) for name in layers.ignore],
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_method": NAME,
        "layer_type_quant_config": {},
        "layer_quant_config": named,
        "kv_cache_quant_config": {pattern: named[pattern] for pattern in group},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": VERSION,
        "export": {
            "kv_cache_group": group, "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }  # fmt: skip
    return Document(block)


def _glob(name: str) -> str:
    """``re:^a\\.b\\..*``, as all below a path is called here, as a glob; other names are exact."""
    return re.sub(r"\\(.)", r"\1", name[4:-2]) + "*" if name.startswith("re:^") else name


def _stored(linear: LinearScheme, scheme: Scheme) -> LinearScheme:
    return LinearScheme(scheme, linear.input, linear.dynamic)


def _of_cache(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in KV_GROUP)


def excluded(module: str, patterns: Sequence[str]) -> bool:
    """Whether a layer is left alone."""
    return any(_matches(module, str(pattern)) for pattern in patterns)


def _matches(module: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(module, pattern)
    try:
        return re.match(pattern[3:], module) is not None
    except re.error:
        return False


def config_of(module: str, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a layer: by name, then by class, then the global one; empty where it is left alone."""
    if excluded(module, block.get("exclude") or ()):
        return {}
    named = [
        found for pattern, found in _table(block, "layer_quant_config").items() if _matches(module, pattern)
    ]
    found = [*named, _table(block, "layer_type_quant_config").get("Linear"), block.get("global_quant_config")]
    return next((config for config in found if isinstance(config, dict)), {})


def _table(block: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = block.get(key)
    return value if isinstance(value, dict) else {}
