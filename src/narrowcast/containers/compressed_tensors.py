"""The compressed-tensors container: how vLLM, SGLang and transformers spell a quantized linear layer.

A module ``m`` becomes tensors ``m.<suffix>``, by the format of its config group:

    format                  codes                          scale (dtype)          more
    float-quantized         weight F8_E4M3 [N, K]          F32 per tile
    naive-quantized         the same, weight-only
    int-quantized           weight I8 [N, K]               F32 per tile
    pack-quantized          weight_packed I32 [N, ⌈Kb/32⌉]  source dtype [N, K/g]  weight_shape, weight_zero_point
    nvfp4-pack-quantized    weight_packed U8 [N, K/2]      F8_E4M3 [N, K/16]      weight_global_scale F32 [1]
    mxfp4-pack-quantized    weight_packed U8 [N, K/2]      U8 [N, K/32]
    mxfp6-pack-quantized    weight_packed U8 [N, 3K/4]     U8 [N, K/32]
    mxfp8-quantized         weight F8_E4M3 [N, K]          U8 [N, K/32]

The global scale is a divisor: 1 / (our outer scale), exact because ours is a power of two. INT4 weights with
8-bit inputs are written as pack-quantized explicitly, since the engines that run W4A8 load packed words while
the library's own inference would pick int-quantized.

Source: compressed-tensors 0.20 (quantization/quant_args.py, compressors/). Left out here: static input scales,
KV-cache scales and transforms, which need calibration; sparse formats, which no current reader loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels import Rows
from narrowcast.numbers.formats import BF16, E2M1, E2M3, E4M3FN, E8M0, FP16, FP32, INT8, Format, Kind
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.writer import Spec
from narrowcast.tensors.packing import BYTES, Packing, pack, packing, unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.scaling import scales_shape
from narrowcast.tensors.schemes import Scheme, integer

NAME = "compressed-tensors"
# The config schema that this file writes is the library's of this version.
VERSION = "0.20.1"
_SCALE_DTYPES: Mapping[str, str] = {
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
    "e8m0": "U8",
    "e4m3fn": "F8_E4M3",
}
_ENGINES: Mapping[str, tuple[str, ...]] = {
    "float-quantized": ("vllm", "sglang", "transformers"),
    "naive-quantized": ("vllm", "transformers"),
    "int-quantized": ("vllm", "sglang", "transformers"),
    "pack-quantized": ("vllm", "sglang", "transformers"),
    "nvfp4-pack-quantized": ("vllm", "sglang", "transformers"),
    "mxfp4-pack-quantized": ("vllm", "transformers"),
    "mxfp6-pack-quantized": ("vllm", "transformers"),
    "mxfp8-quantized": ("vllm", "transformers"),
}


@dataclass(frozen=True)
class Spelling:
    """How one linear scheme is written: the format string, the codes' tensor and packing, the stored scheme."""

    format: str
    weight: str
    dtype: str
    packing: Packing
    scheme: Scheme

    @property
    def engines(self) -> tuple[str, ...]:
        return _ENGINES[self.format]

    @property
    def row_multiple(self) -> int:
        """Rows that a chunk must be a multiple of: whole tiles, and whole words of packed zero points."""
        rows = self.scheme.inner.tile[0] or 1
        if self.scheme.zero is not None:
            rows = max(rows, 32 // self.scheme.zero.bits)
        return rows

    @property
    def width_multiple(self) -> int:
        """What K must be a multiple of: the group, and whole bytes where no shape is stored beside the codes."""
        group = self.scheme.group if self.scheme.inner.tile[0] == 1 else 0
        bits = self.packing.bits
        return group or (1 if self.format == "pack-quantized" else 8 // np.gcd(8, bits))

    def row_bytes(self, k: int) -> int:
        return self.packing.row_bytes(k)


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear`` for a weight of the source dtype; UsageError when it has none."""
    weight = linear.weight
    element, scale = weight.element, weight.inner.format
    if scale is E8M0 and weight.group == 32 and element is E2M1:
        return Spelling("mxfp4-pack-quantized", "weight_packed", "U8", packing(4), weight)
    if scale is E8M0 and weight.group == 32 and element is E2M3:
        return Spelling("mxfp6-pack-quantized", "weight_packed", "U8", packing(6), weight)
    if scale is E8M0 and weight.group == 32 and element is E4M3FN:
        return Spelling("mxfp8-quantized", "weight", "F8_E4M3", BYTES, weight)
    if element is E2M1 and scale is E4M3FN and weight.group == 16:
        return Spelling("nvfp4-pack-quantized", "weight_packed", "U8", packing(4), weight)
    if element is E4M3FN and scale is FP32:
        return Spelling(
            "float-quantized" if linear.input else "naive-quantized", "weight", "F8_E4M3", BYTES, weight
        )
    if element is INT8 and linear.input is not None and scale is FP32:
        return Spelling("int-quantized", "weight", "I8", BYTES, weight)
    if integer(weight) and element.bits in (4, 8) and element.bias == 0 and weight.inner.tile[0] == 1:
        stored = weight.with_scale_format(source if source in (BF16, FP16, FP32) else BF16)
        how = packing(element.bits, flip=element.signed, word=32)
        return Spelling("pack-quantized", "weight_packed", "I32", how, stored)
    raise UsageError(
        f"{NAME} has no spelling for {weight.name}",
        wanted="fp8, int8, int4, nvfp4, mxfp4, mxfp6_e2m3 or mxfp8_e4m3 weights",
        remedy="choose another preset; `narrowcast schemes` says who loads what",
    )


def specs(module: str, how: Spelling, shape: tuple[int, int]) -> list[Spec]:
    """The tensors of a module with weight [N, K]: names, dtypes and shapes."""
    n, k = shape
    rows, cols = scales_shape(shape, how.scheme)[0]
    codes = (n, k) if how.packing is BYTES else (n, how.row_bytes(k) // (4 if how.dtype == "I32" else 1))
    whole = how.scheme.inner.tile == (0, 0)
    found = [
        Spec(f"{module}.{how.weight}", DTYPES[how.dtype], codes),
        Spec(
            f"{module}.weight_scale",
            DTYPES[_SCALE_DTYPES[how.scheme.inner.format.name]],
            (1,) if whole else (rows, cols),
        ),
    ]
    if len(how.scheme.scales) == 2:
        found.append(Spec(f"{module}.weight_global_scale", DTYPES["F32"], (1,)))
    if how.format == "pack-quantized":
        found.append(Spec(f"{module}.weight_shape", DTYPES["I64"], (2,)))
    if how.scheme.zero is not None:
        words = -(-n * how.scheme.zero.bits // 32)
        found.append(Spec(f"{module}.weight_zero_point", DTYPES["I32"], (words, cols)))
    return found


Piece = tuple[str, NDArray[Any], int]


def constants(module: str, how: Spelling, shape: tuple[int, int], outer: float | None) -> Iterator[Piece]:
    """The pieces that do not depend on rows: (tensor, data, byte offset)."""
    if len(how.scheme.scales) == 2:
        assert outer is not None
        yield f"{module}.weight_global_scale", np.float32([1.0]) / np.float32(outer), 0
    if how.scheme.inner.tile == (0, 0):
        assert outer is not None
        yield f"{module}.weight_scale", np.float32([outer]), 0
    if how.format == "pack-quantized":
        yield f"{module}.weight_shape", np.array(shape, np.int64), 0


def pieces(module: str, how: Spelling, start: int, rows: Rows) -> Iterator[Piece]:
    """A quantized chunk beginning at row ``start`` as (tensor, data, byte offset inside the tensor)."""
    packed = rows.packed
    yield f"{module}.{how.weight}", packed, start * packed.shape[-1]
    tile_rows = how.scheme.inner.tile[0]
    if tile_rows:
        yield f"{module}.weight_scale", rows.scales, start // tile_rows * rows.scales[0].nbytes
    if rows.zero is not None and how.scheme.zero is not None:
        words = _pack_zero(rows.zero, how.scheme.zero.bits)
        yield f"{module}.weight_zero_point", words, start * how.scheme.zero.bits // 32 * words[0].nbytes


def _pack_zero(zero: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Zero points [n, groups] packed along n, missing tail rows as zero bits: int32 [⌈n·bits/32⌉, groups]."""
    words = pack(np.ascontiguousarray(zero.T), packing(bits, word=32)).view("<i4")
    return np.ascontiguousarray(words.T)


def unpack_zero(words: NDArray[np.int32], bits: int, n: int) -> NDArray[np.uint8]:
    """The inverse: int32 [words, groups] to zero-point codes [n, groups]."""
    packed = np.ascontiguousarray(words.T).view(np.uint8)
    return np.ascontiguousarray(unpack(packed, packing(bits, word=32), n).T)


def read_outer(reader: Any, module: str, how: Spelling) -> float | None:
    """The outer scale of a module as this toolkit holds it (a multiplier), read from the file."""
    value = np.empty(1, np.float32)
    if len(how.scheme.scales) == 2:
        reader.read_into(f"{module}.weight_global_scale", value)
        return float(np.float32(1) / value[0])
    if how.scheme.inner.tile == (0, 0):
        reader.read_into(f"{module}.weight_scale", value)
        return float(value[0])
    return None


def read_rows(reader: Any, module: str, how: Spelling, shape: tuple[int, int], start: int, stop: int) -> Rows:
    """Rows start:stop of a module's weight, read from the file; ``start`` is a multiple of ``row_multiple``."""
    k = shape[1]
    width = how.row_bytes(k)
    packed = np.empty((stop - start, width), np.uint8)
    reader.read_into(f"{module}.{how.weight}", packed, start * width)
    tile_rows = how.scheme.inner.tile[0]
    cols = scales_shape(shape, how.scheme)[0][1]
    carrier = (
        np.dtype("<f4")
        if how.scheme.inner.format is FP32
        else np.dtype(f"<u{how.scheme.inner.format.bits // 8}")
    )
    if not tile_rows:
        scales = np.empty((1, 1), carrier)
        reader.read_into(f"{module}.weight_scale", scales)
        return Rows(packed, scales)
    scales = np.empty((-(-stop // tile_rows) - start // tile_rows, cols), carrier)
    reader.read_into(f"{module}.weight_scale", scales, start // tile_rows * cols * carrier.itemsize)
    if how.scheme.zero is None:
        return Rows(packed, scales)
    bits = how.scheme.zero.bits
    words = np.empty((-(-stop * bits // 32) - start * bits // 32, cols), np.int32)
    reader.read_into(f"{module}.weight_zero_point", words, start * bits // 32 * cols * 4)
    return Rows(packed, scales, unpack_zero(words, bits, stop - start))


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


Group = tuple[LinearScheme, str, Sequence[str]]


def quantization_config(
    groups: Sequence[Group], linear_names: Sequence[str], ignore: Iterable[str]
) -> dict[str, Any]:
    """The ``quantization_config`` block. ``groups``: (linear scheme, format, module names); ``linear_names``: every
    linear module of the model, so that patterns are only used where they match exactly the group's modules."""
    formats = sorted({fmt for _, fmt, _ in groups})
    written = {}
    for i, (linear, fmt, names) in enumerate(groups):
        written[f"group_{i}"] = {
            "format": fmt,
            "input_activations": arguments(linear.input, linear.dynamic, weight=False)
            if linear.input
            else None,
            "output_activations": None,
            "targets": ["Linear"] if len(groups) == 1 else targets(names, linear_names),
            "weights": arguments(linear.weight, False, weight=True),
        }
    return {
        "config_groups": written,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": NAME,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def targets(names: Sequence[str], linear_names: Sequence[str]) -> list[str]:
    """Module names as targets: one anchored pattern for names that differ in numbers only, wherever that pattern
    matches no linear module outside the group; exact names elsewhere."""
    inside, found, whole = set(names), {}, {}
    shapes: dict[str, list[str]] = {}
    for name in linear_names:
        shapes.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for name in names:
        shape = re.sub(r"\d+", "#", name)
        if shape not in whole:
            alike = shapes.get(shape, [name])
            whole[shape] = len(alike) > 1 and inside.issuperset(alike)
        if whole[shape]:
            pattern = r"\d+".join(re.escape(part).replace(r"\-", "-") for part in shape.split("#"))
            found[f"re:^{pattern}$"] = None
        else:
            found[name] = None
    return list(found)
