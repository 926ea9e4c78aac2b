"""What a torchao checkpoint holds, class by class, held against its metadata and its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from narrowcast.containers.contents import Contents, Source, Stored, contradiction, left_alone
from narrowcast.containers.spelling import Array, Spelling, value_part
from narrowcast.containers.torchao import spellings
from narrowcast.containers.torchao.spellings import NAME, STEM, Parts
from narrowcast.containers.torchao.told import Told, agree, keys, told
from narrowcast.numbers.formats import E2M1, E4M3FN, E5M2, E8M0, FP32, INT8, Format, formats
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile
from narrowcast.tensors.storage import stored_scheme

UINT8 = formats["uint8"]
_FLOATS = ("F32", "BF16", "F16")
_ELEMENTS: Mapping[str, tuple[Format, str]] = {
    "float8_e4m3fn": (E4M3FN, "F8_E4M3"),
    "float8_e5m2": (E5M2, "F8_E5M2"),
    "float4_e2m1fn_x2": (E2M1, "U8"),
}
_QDATA = re.compile(r"\._weight_qdata$")


def claims(source: Source) -> bool:
    """Whether the config names this method."""
    return source.config.get("quant_method") == NAME


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where tensors, metadata and config disagree."""
    tensors = told(source)
    agree(source, tensors)
    matrices, taken = [], []
    for one in tensors.values():
        parts = _parts(source, one)
        _refuse_kept(source, one)
        stored = _stored(source, one, parts)
        matrices.append(stored)
        taken += sorted({entry.name for entry in parts.values()} - set(stored.tensors))
    known = set(taken) | {name for stored in matrices for name in stored.tensors}
    others = [name for name in source.entries if _QDATA.search(name) and name not in known]
    if others or not matrices:
        raise contradiction(
            "the metadata does not say what the tensors are" if others else f"the config says {NAME}, and no tensor is",
            source, got=others[0] if others else f"{len(source.entries)} tensors",
            wanted='"module.weight": {"_type": ..., "_data": ...} in the metadata of the file',
            remedy="copy the files whole: rewriting safetensors loses their metadata",
        )  # fmt: skip
    return Contents(NAME, tuple(matrices), taken=tuple(taken), metadata=keys(source))


def _parts(source: Source, one: Told) -> dict[str, Any]:
    """The tensors of one quantized tensor by the names that its class gives them."""
    if not one.name.endswith(".weight"):
        raise contradiction(
            f"{one.name} is no linear layer's weight", source, got=one.kind, wanted="tensors called ...weight"
        )
    wanted = {name: one.stem + name for name in one.parts}
    missing = [name for name in wanted.values() if name not in source.entries]
    told_of = set(wanted.values())
    extra = [name for name in source.entries if name.startswith(one.stem) and name not in told_of]
    if missing or extra or not {"qdata", "scale"} <= wanted.keys():
        raise contradiction(
            f"{one.name} does not have the tensors that its metadata names", source,
            got=", ".join(extra) or f"{', '.join(missing) or 'no others'} missing", wanted=", ".join(wanted.values()),
            remedy="download or copy the checkpoint again",
        )  # fmt: skip
    return {name: source.entries[key] for name, key in wanted.items()}


def _refuse_kept(source: Source, one: Told) -> None:
    module = one.name.removesuffix(".weight")
    for pattern in source.config.get("modules_to_not_convert") or ():
        if left_alone(str(pattern), module):
            raise contradiction(
                f"{module} is quantized, and the config says that it is not", source, got=one.kind,
                wanted=f"a plain weight, as modules_to_not_convert has {pattern!r}",
            )  # fmt: skip


def _stored(source: Source, one: Told, parts: Parts) -> Stored:
    make = _CLASSES.get(one.kind)
    if make is None:
        raise contradiction(
            f"{one.name} is a {one.kind}, which cannot be read", source, got=one.kind, wanted=", ".join(_CLASSES),
            remedy="dequantize it with torchao, or start from the parent model",
        )  # fmt: skip
    qdata = parts["qdata"]
    if len(qdata.shape) != 2:
        raise contradiction(
            f"{one.name} is no matrix", source, got=f"{qdata.name} {list(qdata.shape)}", wanted="two axes"
        )
    made = make(source, one, parts)
    module, how = one.name.removesuffix(".weight"), made.how
    n, columns = qdata.shape
    shape = (n, columns * (2 if one.kind == "Int4Tensor" or how.scheme.element is E2M1 else 1))
    for part in how.parts:
        entry = source.entries[module + part.suffix]
        single = part.piece in ("outer", "input", "input_zero")
        wanted = part.shape(*shape)
        if entry.shape != wanted or (single and prod(entry.shape) != 1):
            raise contradiction(
                f"{entry.name} does not fit its matrix of {n} x {shape[1]}", source, got=list(entry.shape),
                wanted="one element" if single else list(wanted),
            )  # fmt: skip
    return Stored(module, shape, how, LinearScheme(how.scheme, made.input, made.dynamic))


@dataclass(frozen=True)
class Made:
    """The spelling of a tensor, and what its layer does with inputs."""

    how: Spelling
    input: Scheme | None = None
    dynamic: bool = True


def _float8(source: Source, one: Told, parts: Parts) -> Made:
    _check(source, one, parts, qdata=("F8_E4M3", "F8_E5M2"), scale=_FLOATS)
    how, given = spellings.float8(parts, _block(source, one)), _given(one)
    if not given:
        return Made(how)
    element, _ = _element(source, one, given.get("float8_dtype"))
    return Made(how, stored_scheme(element, _grain(source, one, given), FP32))


def _int8(source: Source, one: Told, parts: Parts) -> Made:
    _check(source, one, parts, qdata=("I8",), scale=_FLOATS, zero_point=("I8",), act_quant_scale=_FLOATS)
    how = spellings.integers(parts, _block(source, one), 8, _zeros(source, parts))
    given = _given(one)
    if not given:
        return Made(_scaled(how, parts))
    uneven = given.get("mapping_type") == "ASYMMETRIC"
    element = UINT8 if uneven else INT8
    act = stored_scheme(element, _grain(source, one, given), FP32, zero=UINT8 if uneven else None)
    how, static = _scaled(how, parts), parts.get("act_quant_scale")
    if static is None:
        return Made(how, act)
    if uneven or "act_quant_zero_point" in parts:
        raise contradiction(
            f"{one.name} has static inputs with zero points, which cannot be read", source, got="act_quant_zero_point",
            wanted="symmetric inputs, or dynamic ones",
        )  # fmt: skip
    part = value_part(f"{STEM}act_quant_scale", "input", static.shape, dtype=static.dtype.name)
    return Made(spellings.extended(how, part), act, dynamic=False)


def _intx(source: Source, one: Told, parts: Parts) -> Made:
    _check(source, one, parts, qdata=("I8",), scale=_FLOATS, zero_point=("I8",))
    width = re.fullmatch(r"int([2-8])", str(one.attributes.get("target_dtype")))
    if width is None:
        raise contradiction(
            f"{one.name} has a dtype that cannot be read", source, got=one.attributes.get("target_dtype"),
            wanted="int2 to int8",
        )  # fmt: skip
    how = spellings.integers(parts, _block(source, one), int(width[1]), _zeros(source, parts))
    given = one.attributes.get("activation_quantization")
    return Made(how, stored_scheme(UINT8, (1, 0), FP32, zero=UINT8) if given else None)


def _int4(source: Source, one: Told, parts: Parts) -> Made:
    _check(source, one, parts, qdata=("I8", "U8"), scale=_FLOATS, zero_point=_FLOATS)
    rows, group = _block(source, one)
    if rows != 1 or "zero_point" not in parts:
        raise contradiction(
            f"{one.name} is no groups of a row", source, got=f"blocks of {rows} x {group}: {', '.join(one.parts)}",
            wanted="blocks of 1 x g with qdata, scale and zero_point",
        )  # fmt: skip
    eight = one.attributes.get("activation_dtype") == "float8_e4m3fn"
    how = _scaled(spellings.int4(parts, group), parts)
    return Made(how, stored_scheme(E4M3FN, (1, 0), FP32) if eight else None)


def _mx(source: Source, one: Told, parts: Parts) -> Made:
    element, dtype = _element(source, one, one.attributes.get("elem_dtype"))
    _check(source, one, parts, qdata=(dtype,), scale=("F8_E8M0", "U8"))
    group, given = one.attributes.get("block_size"), _given(one)
    if type(group) is not int or group < 1:
        raise contradiction(
            f"{one.name} has no size of blocks", source, got=f"block_size {group}", wanted="32"
        )
    act = _element(source, one, given.get("elem_dtype"))[0] if given else None
    how = spellings.microscaling(parts, element, group, bool(one.attributes.get("is_swizzled_scales")))
    return Made(how, stored_scheme(act, (1, group), E8M0) if act else None)


def _nvfp4(source: Source, one: Told, parts: Parts) -> Made:
    _check(
        source, one, parts, qdata=("U8",), scale=("F8_E4M3",), per_tensor_scale=("F32",), act_per_tensor_scale=("F32",)
    )  # fmt: skip
    if one.attributes.get("block_size") not in (None, 16):
        raise contradiction(
            f"{one.name} has other blocks than NVFP4", source, got=one.attributes["block_size"], wanted=16
        )
    how = spellings.nvfp4(parts, bool(one.attributes.get("is_swizzled_scales")))
    if not _given(one):
        return Made(how)
    act, static = stored_scheme(E2M1, (1, 16), E4M3FN, outer=True), parts.get("act_per_tensor_scale")
    if static is None:
        return Made(how, act)
    part = value_part(f"{STEM}act_per_tensor_scale", "input", static.shape)
    return Made(spellings.extended(how, part), act, dynamic=False)


_CLASSES: Mapping[str, Callable[[Source, Told, Parts], Made]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}


def _check(source: Source, one: Told, parts: Parts, **dtypes: tuple[str, ...]) -> None:
    for name, wanted in dtypes.items():
        entry = parts.get(name)
        if entry is not None and entry.dtype.name not in wanted:
            raise contradiction(
                f"{entry.name} is not what a {one.kind} has", source, got=entry.dtype.name, wanted=" or ".join(wanted)
            )  # fmt: skip


def _element(source: Source, one: Told, name: object) -> tuple[Format, str]:
    found = _ELEMENTS.get(str(name))
    if found is None:
        raise contradiction(
            f"{one.name} has elements that cannot be read", source, got=name, wanted=", ".join(_ELEMENTS)
        )
    return found


def _block(source: Source, one: Told) -> Tile:
    block = one.attributes.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or any(type(x) is not int or x < 1 for x in block):
        raise contradiction(
            f"{one.name} has no block of rows and columns", source, got=f"block_size {block}", wanted="[rows, columns]"
        )  # fmt: skip
    return block[0], block[1]


def _given(one: Told) -> Mapping[str, Any]:
    """What a class says of its input; empty where it stays wide."""
    found = one.attributes.get("act_quant_kwargs")
    return found if isinstance(found, Mapping) else {}


def _grain(source: Source, one: Told, given: Mapping[str, Any]) -> Tile:
    """The tile of an input: a token's row, all of it, or groups of a row."""
    grain = given.get("granularity")
    grain = grain if isinstance(grain, Mapping) else {"_type": grain}
    kind = grain.get("_type")
    tile = {"PerRow": (1, 0), "PerToken": (1, 0), "PerTensor": (0, 0)}.get(str(kind))
    block = grain.get("block_size")
    if tile is None and kind == "PerBlock" and isinstance(block, list) and len(block) == 2:
        return int(block[0]), int(block[1])
    if tile is None:
        raise contradiction(
            f"{one.name} has inputs that cannot be read", source, got=f"granularity {kind}",
            wanted="PerRow, PerToken, PerTensor or PerBlock",
        )  # fmt: skip
    return tile


def _zeros(source: Source, parts: Parts) -> Array | None:
    """Zero points, or None where all are 0: only the numbers tell."""
    entry = parts.get("zero_point")
    if entry is None:
        return None
    zeros = source.checkpoint.array(entry.name)
    return zeros if zeros.any() else None


def _scaled(how: Spelling, parts: Parts) -> Spelling:
    """With the scale that multiplies each column's input, where there is one."""
    entry = parts.get("act_pre_scale")
    if entry is None:
        return how
    return spellings.extended(
        how, value_part(f"{STEM}act_pre_scale", "pre_scale", entry.shape, dtype=entry.dtype.name)
    )
