"""The ``quantization_config`` block of compressed-tensors: arguments, groups, targets.

A config group says of its targets what their weights and inputs are. Targets are written as patterns only where a
pattern matches exactly the group's modules, so that no engine's matching order can change what is meant.

Source: compressed-tensors 0.20 (quantization/quant_config.py, quant_args.py). Left out: sparsity, which no current
reader loads, and transforms, which are read and carried (``read``) but never made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowcast.containers.container import Document, Layers
from narrowcast.containers.targets import targets
from narrowcast.numbers.formats import E8M0, Kind
from narrowcast.tensors.schemes import Scheme

NAME = "compressed-tensors"
# The config schema that this file writes is the library's of this version.
VERSION = "0.20.1"
KV_SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    },
    "fp8_head": {
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "strategy": "attn_head",
        "symmetric": True,
        "type": "float",
    },
}


def arguments(scheme: Scheme, dynamic: bool, weight: bool) -> dict[str, Any]:
    """One scheme as QuantizationArgs, with the keys that the library serialises."""
    rows, cols = scheme.inner.tile
    args: dict[str, Any] = {
        "dynamic": dynamic,
        "group_size": cols if rows == 1 and cols else None,
        "num_bits": scheme.element.bits,
        "symmetric": scheme.zero is None,
        "type": "int" if scheme.element.kind is Kind.INT else "float",
    }
    if len(scheme.scales) == 2:
        args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        if not weight:
            args |= {"dynamic": "local", "observer": "static_minmax"}
    elif (rows, cols) == (0, 0):
        args["strategy"] = "tensor"
    elif rows == 1 and cols:
        args["strategy"] = "group"
    elif rows > 1:
        args |= {"strategy": "block", "block_structure": [rows, cols]}
    else:
        args["strategy"] = "channel" if weight else "token"
    if scheme.inner.format is E8M0:
        args["scale_dtype"] = "torch.uint8"
    return dict(sorted(args.items()))


def _linears(names: Sequence[str], all_embeddings: frozenset[str]) -> list[str]:
    """The targets of the only group: the class that engines quantize, and by name an embedding, which is none."""
    embeddings = [name for name in names if name in all_embeddings]
    return ["Linear"] * (len(embeddings) < len(names)) + embeddings


def document(layers: Layers) -> Document:
    """The config block for groups of equal linear schemes; ``layers.linear_names`` is every linear module of the
    model, so that patterns are only used where they match exactly the group's modules."""
    groups = layers.groups
    formats = sorted({group.how.format for group in groups})
    written = {}
    for i, group in enumerate(groups):
        linear = group.linear
        written[f"group_{i}"] = {
            "format": group.how.format,
            "input_activations": arguments(linear.input, linear.dynamic, weight=False)
            if linear.input
            else None,
            "output_activations": None,
            "targets": _linears(group.names, layers.embeddings)
            if len(groups) == 1
            else targets(group.names, layers.linear_names),
            "weights": arguments(linear.weight, False, weight=True),
        }
    block = {
        "config_groups": written,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(layers.ignore),
        "kv_cache_scheme": KV_SCHEMES[layers.kv] if layers.kv else None,
        "quant_method": NAME,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }
    return Document(block)
