"""The page of ``narrowcast inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.jobs.inspect import Inspection
from narrowcast.model.geometry import Attention, Geometry
from narrowcast.report.tables import facts, hanging, paragraph, quantity, size, table

_SHORT = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "inner",
    "num_attention_heads": "heads",
    "num_key_value_heads": "KV heads",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "positions",
}


def inspect_page(found: Inspection) -> list[str]:
    """Architecture, sizes, bytes by role and scheme, bytes by dtype, ties, oddities."""
    lines = [found.model, "", *facts(_head(found)), ""]
    lines += [*_roles(found), "", *_dtypes(found)]
    remarks = [part for oddity in found.oddities for part in hanging(f"note: {oddity}")]
    unread = "Headers and config were read. Values were not, so NaN and infinity would go unseen."
    return [*lines, "", *(remarks and [*remarks, ""]), *paragraph(unread)]


def _head(found: Inspection) -> list[tuple[str, str]]:
    kind = (found.config or {}).get("model_type")
    architecture = ", ".join(found.architectures) or "not known"
    shards = f"{len(found.shards)} shard{'s' if len(found.shards) != 1 else ''}, {found.tensors} tensors"
    return [
        ("architecture", architecture + (f" ({kind})" if kind else "")),
        ("sizes", ", ".join(f"{_SHORT[key]} {value}" for key, value in found.sizes.items())),
        ("quantization", _method(found.quantization) if found.config is not None else ""),
        ("parameters", f"{found.parameters:,} ({quantity(found.parameters)})"),
        ("bytes", f"{found.nbytes:,} ({size(found.nbytes)}) in {shards}"),
        ("kept per token", _kept(found.geometry) if found.geometry is not None else ""),
        ("tied", "; ".join(f"{head} is {embedding}" for head, embedding in found.tied)),
        (
            "beside them",
            f"{len(found.side_files)} side file{'s' * (len(found.side_files) > 1)}"
            if found.side_files
            else "",
        ),
    ]


def _kept(geometry: Geometry) -> str:
    """Bytes that one further token adds to a cache in 16 bits, and how they come about; windows that are not full."""
    layers = ", ".join(filter(None, map(_layers, geometry.attention)))
    return f"{2 * geometry.kept_elements():,} bytes in 16 bits ({layers})"


def _layers(kept: Attention) -> str:
    """``22 layers x 4 heads x 2 x 64``; what recurrent layers keep is of a sequence, whatever its length."""
    some = f"{kept.keeping} layer{'s' * (kept.keeping != 1)}"
    if kept.kind == "state":
        return f"{some} with a state instead"
    if kept.kind == "latent":
        return f"{some} x {kept.k_dim} of a latent" + (", its index not counted" if kept.index else "")
    heads = f"{kept.kv_heads} head{'s' * (kept.kv_heads != 1)}"
    dims = f"2 x {kept.k_dim}" if kept.k_dim == kept.v_dim else f"({kept.k_dim} + {kept.v_dim})"
    window = f" within {kept.window:,} tokens" if kept.window is not None else ""
    return f"{some} x {heads} x {dims}{window}"


def _method(config: Mapping[str, Any] | None) -> str:
    """The method and the plain settings of a quantization_config."""
    if config is None:
        return "none"
    name = str(config.get("quant_method") or config.get("quant_algo") or "unnamed")
    kept = (
        "format",
        "quant_algo",
        "bits",
        "group_size",
        "weight_block_size",
        "activation_scheme",
        "scale_fmt",
        "sym",
    )
    settings = [
        f"{key} {config[key]}" for key in kept if config.get(key) is not None and str(config[key]) != name
    ]
    return ", ".join([name, *settings])


def _roles(found: Inspection) -> list[str]:
    rows = []
    for (role, scheme), (modules, parameters, nbytes) in found.groups().items():
        bits = f"{8 * nbytes / parameters:.2f}" if parameters else "-"
        rows.append((role, scheme, str(modules), quantity(parameters), size(nbytes), bits))
    return table(("role", "stored as", "modules", "parameters", "bytes", "bits"), rows, "lLrrrr", indent=2)


def _dtypes(found: Inspection) -> list[str]:
    rows = [(name, str(tensors), size(nbytes)) for name, (tensors, nbytes) in found.dtypes.items()]
    return table(("dtype", "tensors", "bytes"), rows, "lrr", indent=2)
