"""compressed-tensors at work on one weight: observe, compress, decompress, and our QTensor in its clothes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from numpy.typing import NDArray

from narrowcast.numbers.codec import decode
from narrowcast.numbers.formats import BF16, E4M3FN, E8M0, FP16, FP32, Format, Kind
from narrowcast.tensors.packing import pack, packing
from narrowcast.tensors.qtensor import QTensor

WEIGHT_SCHEMES = {
    "FP8": "fp8_tensor", "FP8_DYNAMIC": "fp8_channel", "FP8_BLOCK": "fp8_block128", "W8A8": "int8_channel",
    "W8A16": "int8_g128", "W4A16": "int4_g128", "W4A16_ASYM": "uint4_g128", "NVFP4A16": "nvfp4",
    "MXFP4A16": "mxfp4", "MXFP6A16": "mxfp6_e2m3", "MXFP8A16": "mxfp8_e4m3",
}  # fmt: skip
TORCH_DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}
State = dict[str, torch.Tensor]


def peer_scheme(preset: str, group: int | None = None) -> QuantizationScheme:
    """The library's scheme of a preset, on smaller groups where asked."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group is not None:
        scheme.weights.group_size = group
    return scheme


def strategy_of(scheme: QuantizationScheme) -> str:
    strategy = scheme.weights.strategy
    return str(getattr(strategy, "value", strategy))


def observe(w: torch.Tensor, scheme: QuantizationScheme) -> State:
    """Minimum and maximum of every tile of w, made into the parameters that the compressor takes."""
    args, strategy = scheme.weights, strategy_of(scheme)
    if strategy in ("group", "tensor_group"):
        tiles = w.unflatten(-1, (-1, args.group_size))
        low, high = tiles.amin(-1), tiles.amax(-1)
    elif strategy == "channel":
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    elif strategy == "block":
        rows, cols = args.block_structure
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % cols, 0, -w.shape[0] % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, cols))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        low, high = w.amin(), w.amax()
    outer = generate_gparam(w.amin(), w.amax()) if strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=outer)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    if outer is not None:
        state["weight_global_scale"] = outer
    return state


def compressor(scheme: QuantizationScheme) -> Any:
    found = infer_module_format(torch.nn.Linear, scheme)
    return BaseCompressor.load_from_registry(getattr(found, "value", found))


def compress(w: torch.Tensor, scheme: QuantizationScheme) -> State:
    """What the library would write to a file for this weight."""
    state: State = compressor(scheme).compress(observe(w, scheme), scheme)
    return state


def decompress(state: State, scheme: QuantizationScheme) -> torch.Tensor:
    """The weight that the library reads from such a file."""
    weight: torch.Tensor = compressor(scheme).decompress(dict(state), scheme)["weight"]
    return weight


def raw(tensor: torch.Tensor) -> str:
    """Little-endian bytes, row-major, in hexadecimal."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes().hex()


def stored_scale(q: QTensor, strategy: str) -> torch.Tensor:
    """The innermost scales in the library's dtype and shape."""
    fmt, stored = q.scheme.inner.format, q.scales[0]
    if fmt is E8M0:
        return torch.from_numpy(stored)
    if fmt is E4M3FN:
        return torch.from_numpy(stored).view(torch.float8_e4m3fn)
    values = torch.from_numpy(decode(stored, fmt) if fmt is not FP32 else stored).to(TORCH_DTYPES[fmt])
    return values.flatten() if strategy == "tensor" else values


def as_state(q: QTensor, scheme: QuantizationScheme) -> State:
    """Our tensor under the names, dtypes and packing of the library's files."""
    element, strategy = q.scheme.element, strategy_of(scheme)
    state: State = {"weight_scale": stored_scale(q, strategy)}
    packed_int = element.kind is Kind.INT and scheme.input_activations is None
    if element.bits == 8 and not packed_int:
        dtype = torch.int8 if element.kind is Kind.INT else torch.float8_e4m3fn
        return state | {"weight": torch.from_numpy(q.codes).view(dtype)}
    how = packing(element.bits, flip=element.signed, word=32) if packed_int else packing(element.bits)
    packed = torch.from_numpy(pack(q.codes, how))
    state["weight_packed"] = packed.view(torch.int32) if packed_int else packed
    if packed_int:
        state["weight_shape"] = torch.tensor(q.shape)
    if q.zero is not None:
        down = pack(np.ascontiguousarray(q.zero.T), packing(element.bits, word=32))
        state["weight_zero_point"] = torch.from_numpy(down).view(torch.int32).T.contiguous()
    if len(q.scales) == 2:
        outer = q.scale_values(1).ravel()
        divides = q.scheme.scales[1].divides
        state["weight_global_scale"] = torch.from_numpy(outer if divides else np.float32(1) / outer)
    return state


def to_torch(x: NDArray[np.float32], source: Format) -> torch.Tensor:
    return torch.from_numpy(x.copy()).to(TORCH_DTYPES[source])
