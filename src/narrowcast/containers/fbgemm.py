"""FBGEMM FP8 (``quant_method: "fbgemm_fp8"``): E4M3 weights under a scale for each output channel.

    linear           weight F8_E4M3 [N, K], weight_scale F32 [N, 1]                         w[n, k] = code · scale[n]
    Llama 4 experts  gate_up_proj [E, H, 2I] with gate_up_proj_scale [E, 1, 2I],
                     down_proj [E, I, H] with down_proj_scale [E, H, 1]              w[e, n, k] = code[e, k, n] · scale

Experts lie inputs first, as Llama 4 multiplies them; both scales run over output channels, whatever their shape.
Inputs are quantized per token, with an amax of ``activation_scale_ub`` at most, which no other container can say.

Source: transformers 5.24 (integrations/fbgemm_fp8.py). Left out: writing, since engines have dropped it for
compressed-tensors, which holds the same scheme.
"""

from __future__ import annotations

import numpy as np

from narrowcast.containers.container import Container
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather
from narrowcast.containers.skipped import skipped_by
from narrowcast.containers.spelling import Part, Spelling, code_part, scale_part
from narrowcast.numbers.formats import E4M3FN, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, schemes
from narrowcast.tensors.storage import stored_scheme

NAME = "fbgemm-fp8"
METHOD = "fbgemm_fp8"
_STACKS = (".gate_up_proj", ".down_proj")


def _spell(scheme: Scheme, dtype: str, stacked: bool) -> Spelling:
    if not stacked:
        parts = (code_part(".weight", "F8_E4M3", BYTES), scale_part(".weight_scale", dtype, scheme))
    else:
        codes = Part(
            "", "codes", "F8_E4M3", lambda n, k: (k, n), across=True,
            decode=lambda stored, n: np.ascontiguousarray(stored.T),
        )  # fmt: skip
        parts = (codes, scale_part("_scale", dtype, scheme))
    return Spelling(NAME, NAME, scheme, BYTES, parts)


def claims(source: Source) -> bool:
    """Whether the config names this method."""
    return source.config.get("quant_method") == METHOD


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    matrices = []
    for module, parts in gather(source.entries, (".weight", ".weight_scale", "_scale")).items():
        if ".weight_scale" in parts:
            matrices.append(_stored(source, module, parts.get(".weight"), parts[".weight_scale"]))
        elif "_scale" in parts and module.endswith(_STACKS):
            matrices.append(_stored(source, module, source.entries.get(module), parts["_scale"]))
    bound = source.config.get("activation_scale_ub")
    note = f"activation_scale_ub {bound}: inputs were quantized with an amax of at most this, which is not carried"
    return Contents(NAME, tuple(matrices), notes=(note,) if bound is not None and matrices else ())


def _stored(source: Source, module: str, codes: Entry | None, scale: Entry) -> Stored:
    stacked = not scale.name.endswith(".weight_scale")
    if codes is None or codes.dtype.name != "F8_E4M3" or len(codes.shape) != 2 + stacked:
        raise contradiction(
            f"{module} has a scale and no matrix of E4M3 codes", source, wanted=f"F8_E4M3 of {2 + stacked} axes",
            got="nothing" if codes is None else f"{codes.dtype.name} {list(codes.shape)}",
        )  # fmt: skip
    *experts, first, second = codes.shape
    shape = (second, first) if stacked else (first, second)
    fmt = formats.get(DTYPES[scale.dtype.name].format or "")
    if fmt is None or fmt.name not in ("fp32", "bf16", "fp16"):
        raise contradiction(
            f"{module} has scales that nothing explains", source, got=scale.dtype.name, wanted="F32"
        )
    allowed = _scale_shapes(module, shape, experts)
    if scale.shape not in allowed:
        raise contradiction(
            f"{module}: its scales are not one for each output channel", source, got=list(scale.shape),
            wanted=" or ".join(str(list(one)) for one in allowed),
        )  # fmt: skip
    entry = skipped_by(module, source.config.get("modules_to_not_convert") or ())
    if entry is not None:
        raise contradiction(
            f"{module} is quantized, and the config keeps it unquantized", source, got=scale.name,
            wanted=f"no quantized layer that {entry!r} names",
        )  # fmt: skip
    linear = LinearScheme(stored_scheme(E4M3FN, (1, 0), fmt), schemes["fp8_token"])
    how = _spell(linear.weight, scale.dtype.name, stacked)
    return Stored(module, shape, how, linear, experts[0] if stacked else None)


def _scale_shapes(module: str, shape: tuple[int, int], experts: list[int]) -> tuple[tuple[int, ...], ...]:
    n = shape[0]
    if not experts:
        return ((n, 1), (n,))
    return ((experts[0], 1, n),) if module.endswith("gate_up_proj") else ((experts[0], n, 1),)


CONTAINER = Container(name=NAME, title="FBGEMM FP8 (Llama 3.1 405B, Llama 4)", claims=claims, read=read)
