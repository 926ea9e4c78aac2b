"""What ModelOpt's two configs say: hf_quant_config.json beside the weights, and the block in config.json.

    hf_quant_config.json                    quantization_config
    quantization.quant_algo                 quant_algo
    quantization.kv_cache_quant_algo        kv_cache_scheme: {num_bits 8, type float} is FP8, else the name itself
    quantization.exclude_modules            ignore
    quantization.quantized_layers           quantized_layers        (MIXED_PRECISION: the algorithm of each module)
    quantization.group_size                 only in config_groups, and there not for every algorithm

Older files have one of them, or the first form in config.json as well. Where there are two they must agree. Both are
written from the same facts, the second as ModelOpt derives it from the first.

Excluded is a module whose name is listed, or has a listed name within it, or matches a listed pattern (``*``, ``?``).
The second rule means that ``mlp.gate`` takes ``mlp.gate_proj`` along; a list that would do so is not written.

Source: nvidia-modelopt 0.47 (torch/export/convert_hf_config.py), vLLM 0.32 (quantization/modelopt.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from narrowcast.containers.container import Document, Layers
from narrowcast.containers.contents import Source, contradiction
from narrowcast.containers.modelopt.spellings import ALGORITHMS, ALIASES, NAME
from narrowcast.errors import UsageError

BESIDE = "hf_quant_config.json"
# The config schema that this file writes is the library's of this version.
PRODUCER = {"name": NAME, "version": "0.47.0"}
MIXED = "MIXED_PRECISION"
KV = {"FP8": "fp8", "NVFP4": "nvfp4"}


@dataclass(frozen=True)
class Labels:
    """What one config says, or both. ``algorithm`` in capitals, empty where no weight is quantized; ``layers`` maps
    modules to (algorithm, group_size) under MIXED_PRECISION; ``wide``: it says that no input is quantized."""

    where: str
    algorithm: str
    kv: str | None
    exclude: tuple[str, ...]
    layers: Mapping[str, tuple[str, int | None]]
    group: int | None = None
    wide: bool = False

    def of(self, module: str) -> tuple[str, int | None]:
        """Algorithm and group size that a module has by its label, the nearest listed module above it counting."""
        if self.algorithm != MIXED:
            return self.algorithm, self.group
        path = module
        while path:
            if path in self.layers:
                return self.layers[path]
            path = path.rpartition(".")[0]
        return "", None


def excluded(module: str, patterns: Iterable[str]) -> bool:
    """Whether ModelOpt's readers leave a module alone."""
    return any(pattern in module or fnmatchcase(module, pattern) for pattern in patterns)


def labels(source: Source) -> Labels:
    """What the configs say; CheckpointError where they cannot be read or disagree."""
    told = []
    beside = source.beside.get(BESIDE)
    if beside is not None:
        told.append(_labels(source, beside, BESIDE))
    if source.config:
        told.append(_labels(source, source.config, "config.json"))
    first = told[0]
    for other in told[1:]:
        for field in ("algorithm", "kv", "exclude", "layers", "group"):
            ours, theirs = getattr(first, field), getattr(other, field)
            if field == "group" and None in (ours, theirs):
                continue
            if field == "exclude":
                ours, theirs = tuple(sorted(set(ours) - set(theirs))), tuple(sorted(set(theirs) - set(ours)))
            if ours != theirs:
                raise contradiction(
                    f"{first.where} and {other.where} disagree about {_FIELDS[field]}", source,
                    got=f"{_said(ours)} in {first.where}", wanted=f"{_said(theirs)} as in {other.where}",
                    remedy="remove the one that the tensors do not follow",
                )  # fmt: skip
    group = next((label.group for label in told if label.group), None)
    return Labels(
        first.where, first.algorithm, first.kv, first.exclude, first.layers, group, any(x.wide for x in told)
    )


_FIELDS = {
    "algorithm": "the algorithm", "kv": "the KV cache", "exclude": "what is left out", "layers": "the layers",
    "group": "the group size",
}  # fmt: skip


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {algorithm}" for name, (algorithm, _) in sorted(value.items())]
    if isinstance(value, (list, tuple)):
        more = f" and {len(value) - 3} more" if len(value) > 3 else ""
        return ", ".join(map(str, value[:3])) + more or "nothing"
    return str(value or "nothing")


def _labels(source: Source, block: Mapping[str, Any], where: str) -> Labels:
    def taken(key: str, kind: type, default: Any) -> Any:
        value = inner.get(key)
        if value is not None and not isinstance(value, kind):
            raise contradiction(
                f"{key} is no {_KINDS[kind]}",
                source,
                got=f"{value!r:.60} in {where}",
                wanted=f"a {_KINDS[kind]}",
            )
        return default if value is None else value

    nested = block.get("quantization")
    inner: Mapping[str, Any] = nested if isinstance(nested, dict) else block
    layers = {
        str(name): (_algorithm(entry.get("quant_algo")), _size(entry.get("group_size")))
        for name, entry in taken("quantized_layers", dict, {}).items()
        if isinstance(entry, dict)
    }
    groups = [group for group in taken("config_groups", dict, {}).values() if isinstance(group, dict)]
    sizes = {
        _size(weights.get("group_size"))
        for group in groups
        if isinstance(weights := group.get("weights"), dict)
    }
    return Labels(
        where,
        _algorithm(taken("quant_algo", str, "")),
        _cache(inner),
        tuple(str(name) for name in taken("exclude_modules", list, taken("ignore", list, []))),
        layers,
        _size(inner.get("group_size")) or (sizes.pop() if len(sizes) == 1 and not layers else None),
        bool(groups) and all(group.get("input_activations") is None for group in groups),
    )  # fmt: skip


_KINDS: Mapping[type, str] = {dict: "table", list: "list", str: "string"}


def _algorithm(name: Any) -> str:
    upper = str(name or "").upper()
    return ALIASES.get(upper, upper)


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _cache(inner: Mapping[str, Any]) -> str | None:
    """The cache's algorithm in capitals, in either spelling."""
    value = inner.get("kv_cache_quant_algo") or inner.get("kv_cache_scheme")
    if isinstance(value, dict):
        kind = f"{value.get('type')}{value.get('num_bits')}"
        return {"float8": "FP8", "float4": "NVFP4", "int8": "INT8"}.get(kind, kind)
    return str(value).upper() if value else None


def document(layers: Layers) -> Document:
    """Both configs for groups of equal layers; UsageError where the names of what is kept would take others along."""
    kinds = {
        name: {"quant_algo": group.how.format, **_facts(group.how.format, group.how.scheme.group)}
        for group in layers.groups
        for name in group.names
    }
    kv = next((name for name, ours in KV.items() if ours == layers.kv), None)
    quantization: dict[str, Any]
    first = next(iter(kinds.values()), {"quant_algo": None})
    if any(kind != first for kind in kinds.values()):
        quantization = {"quant_algo": MIXED, "kv_cache_quant_algo": kv, "quantized_layers": kinds}
    else:
        exclude = sorted(patterns(layers.ignore, list(kinds)))
        algorithm = {"quant_algo": first["quant_algo"], "kv_cache_quant_algo": kv}
        quantization = algorithm | first | {"exclude_modules": exclude}
    beside = {"producer": PRODUCER, "quantization": quantization}
    return Document(flat(beside), {BESIDE: (json.dumps(beside, indent=4) + "\n").encode()})


def _facts(algorithm: str, group: int) -> dict[str, Any]:
    """What stands beside the name of an algorithm."""
    if algorithm.endswith("_AWQ"):
        return {"group_size": group, "has_zero_point": False, "pre_quant_scale": True}
    size = ALGORITHMS[algorithm.upper()].group
    return {"group_size": size} if size else {}


def patterns(ignore: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """What is kept as ModelOpt lists it: exact names, and ``path*`` for all that is below a path."""
    found = []
    for name in ignore:
        below = re.fullmatch(r"re:\^(.*)\\\.\.\*", name)
        if below is None:
            found.append(name)
            continue
        path = re.sub(r"\\(.)", r"\1", below[1])
        found.append(f"{path}*")
    for pattern in found:
        lost = [name for name in quantized if excluded(name, [pattern])]
        if lost:
            raise UsageError(
                f"keeping {pattern} would keep {lost[0]} as well, since {NAME}'s readers look for names within names",
                where=NAME, remedy=f"keep {lost[0]} too, or choose another container",
            )  # fmt: skip
    return found


def flat(beside: Mapping[str, Any]) -> dict[str, Any]:
    """The block of config.json, from what stands in hf_quant_config.json."""
    said = beside["quantization"]
    algorithm, kv = said["quant_algo"], said["kv_cache_quant_algo"]
    block: dict[str, Any] = {}
    if algorithm == MIXED:
        alike: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name, kind in said["quantized_layers"].items():
            alike.setdefault(tuple(sorted(kind.items())), []).append(name)
        block["config_groups"] = {
            f"group_{i}": _group(dict(kind)) | {"targets": sorted(names)}
            for i, (kind, names) in enumerate(alike.items())
        }
        block["quantized_layers"] = said["quantized_layers"]
    elif algorithm in ("FP8", "NVFP4", "W4A16_NVFP4"):
        block["config_groups"] = {"group_0": _group(said) | {"targets": ["Linear"]}}
    block["ignore"] = said.get("exclude_modules", [])
    if algorithm is not None:
        block["quant_algo"] = algorithm
    if kv is not None:
        block["kv_cache_scheme"] = _args(8) if kv == "FP8" else kv
    return block | {"producer": beside["producer"], "quant_method": NAME}


def _args(bits: int, kind: str = "float", group: int | None = None, **more: Any) -> dict[str, Any]:
    return (
        {"dynamic": False, "num_bits": bits, "type": kind} | ({"group_size": group} if group else {}) | more
    )


def _group(said: Mapping[str, Any]) -> dict[str, Any]:
    """Weights and inputs of one algorithm, as ModelOpt's own conversion puts them."""
    algorithm, size = said["quant_algo"], said.get("group_size")
    eight, four, int8 = _args(8), _args(4, group=size), _args(8, "int")
    both: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
        "FP8": (eight, eight),
        "FP8_PER_CHANNEL_PER_TOKEN": (eight, _args(8, strategy="channel")),
        "NVFP4": (four, four),
        "W4A16_NVFP4": (None, four),
        "W4A16_AWQ": (None, _args(4, "int", size)),
        "W4A8_AWQ": (_args(8, group=size), four),
        "W8A16": (None, int8),
        "W8A8_SQ_PER_CHANNEL": (int8, _args(8, "int", strategy="channel")),
        "W4A8_MXFP4_FP8": (eight, four),
        "MXFP8": (_args(8, group=size), _args(8, group=size)),
    }
    if algorithm not in both:
        return {"quant_algo": algorithm}
    inputs, weights = both[algorithm]
    return ({"input_activations": inputs} if inputs else {}) | {"weights": weights}
