"""ONNX QDQ: codes as an initializer of their own type, decoded by DequantizeLinear.

    y = (x - zero_point) · scale        scale: a scalar, one per index of an axis, or one per block of the last axis

A scheme's tiles become one of these three granularities. Row blocks (128x128) have no granularity of their own, so
their scales are repeated along the rows. Scales that are not fp32 stay in their stored format and are widened in the
graph, by Cast, or for NVFP4's E4M3 scales by a DequantizeLinear of their own whose scale is the outer one. So the
file holds the codes and scales of the QTensor, and what it computes is ``QTensor.dequantize``, bit for bit.

onnxruntime's CPU provider has no kernel that takes FLOAT4E2M1. The default form therefore keeps the same bytes as
UINT4 and looks the values up, then goes on as float8, which holds every E2M1 value, minus zero included:

    UINT4 → Cast INT32 → Gather from the 16 values → Cast FLOAT8E4M3FN → DequantizeLinear

Facts: the ONNX operators Cast, QuantizeLinear and DequantizeLinear, opsets 19 to 25. What runs where was measured and
is in docs/onnx.md.

Left out: FP6 (float6 exists from opset 28, which onnxruntime 1.32 does not load), NF4 and MXINT8 (no ONNX type),
dynamic input scales, and whole models, whose graph a checkpoint does not contain.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast._version import __version__
from narrowcast.errors import InputError, UsageError
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, E8M0, FP16, FP32, UINT4, Format
from narrowcast.store.places import check_absent, partial_path, place
from narrowcast.store.writer import storage_error, sync_directory
from narrowcast.tensors.packing import pack, packing
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import spread
from narrowcast.tensors.schemes import Scheme, Tile

Float4 = Literal["table", "float4"]

# The ONNX name of a format, and the first opset whose DequantizeLinear (for scales: Cast) takes it.
ELEMENTS: Mapping[str, tuple[str, int]] = {
    "e4m3fn": ("FLOAT8E4M3FN", 19),
    "e4m3fnuz": ("FLOAT8E4M3FNUZ", 19),
    "e5m2": ("FLOAT8E5M2", 19),
    "e5m2fnuz": ("FLOAT8E5M2FNUZ", 19),
    "int8": ("INT8", 19),
    "uint8": ("UINT8", 19),
    "int4": ("INT4", 21),
    "uint4": ("UINT4", 21),
    "e2m1": ("FLOAT4E2M1", 23),
    "int2": ("INT2", 25),
    "uint2": ("UINT2", 25),
}
SCALES: Mapping[str, tuple[str, int]] = {
    FP32.name: ("FLOAT", 19),
    FP16.name: ("FLOAT16", 19),
    BF16.name: ("BFLOAT16", 19),
    E4M3FN.name: ("FLOAT8E4M3FN", 19),
    E8M0.name: ("FLOAT8E8M0", 24),
}
_BLOCKED = 21
_ONE_FILE = (
    2**31 - 2**24
)  # bytes of weights; a protobuf message ends at 2 GiB, the graph has room in the rest


def export(weights: Mapping[str, QTensor], path: str | os.PathLike[str], *, float4: Float4 = "table") -> Path:
    """Write a model without inputs that has each weight, decoded to FLOAT [..., N, K], as an output of its name.

    ``float4`` says how E2M1 is stored: "table" runs in onnxruntime on CPU, "float4" uses the type FLOAT4E2M1, for
    runtimes that have it. Above 2 GiB the weights lie next to ``path`` in ``path.data``. Raises UsageError for a
    scheme that ONNX cannot express, a clash of names or a path that exists; StorageError when writing fails.
    """
    if not weights:
        raise UsageError("nothing to export", got="no weights", wanted="at least one")
    graph = _Graph(float4)
    outputs = []
    for name, q in weights.items():
        graph.weight(name, q)
        outputs.append((name, q.shape))
    return graph.save(path, [], outputs)


def export_linear(
    q: QTensor,
    path: str | os.PathLike[str],
    bias: NDArray[np.float32] | None = None,
    input: Scheme | None = None,
    *,
    input_scale: float | None = None,
    float4: Float4 = "table",
) -> Path:
    """Write one linear layer, Y [M, N] = X [M, K] · Wᵀ + bias, FLOAT in and out: a Gemm with W = ``q`` [N, K] decoded
    in the graph and ``bias`` float32 [N].

    With ``input``, a scheme of one scale per tensor such as fp8_tensor, X goes through QuantizeLinear and
    DequantizeLinear under the static ``input_scale``. ``float4`` and errors are those of ``export``.
    """
    if len(q.shape) != 2:
        raise UsageError("a linear layer has one matrix", got=f"shape {q.shape}", wanted="[N, K]")
    n, k = q.shape
    graph = _Graph(float4)
    x = "X" if input is None else graph.static_input("X", input, input_scale)
    if input is None and input_scale is not None:
        raise UsageError("an input scale without an input scheme", got=input_scale, wanted="input=Scheme")
    operands = [x, graph.weight("weight", q)]
    if bias is not None:
        if bias.shape != (n,):
            raise InputError("the bias does not fit the weight", got=bias.shape, wanted=(n,))
        operands.append(graph.floats("bias", bias))
    graph.node("Gemm", operands, "Y", transB=1)
    return graph.save(path, [("X", ("M", k))], [("Y", ("M", n))])


class _Graph:
    """Nodes and initializers as they are added, and the opset that they need."""

    def __init__(self, float4: Float4) -> None:
        if float4 not in ("table", "float4"):
            raise UsageError("unknown way to store float4", got=float4, wanted="table or float4")
        self._onnx = _import_onnx()
        self._float4 = float4
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._names: set[str] = set()
        self._table = ""  # the name of E2M1's values, once they are in the graph
        self._opset = 19
        self._bytes = 0

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        self._claim(output)
        self._nodes.append(self._onnx.helper.make_node(op, inputs, [output], **attributes))
        return output

    def floats(self, name: str, values: NDArray[Any]) -> str:
        """Add an fp32 initializer."""
        return self._initializer(name, SCALES[FP32.name], values.shape, values.astype(np.float32))

    def weight(self, name: str, q: QTensor) -> str:
        """Add a quantized weight; the value ``name`` is its decoded fp32 tensor."""
        scheme = q.scheme
        if scheme.zero not in (None, scheme.element):
            problem = "ONNX keeps a zero point in the type of the elements"
            raise UsageError(problem, where=name, got=scheme.zero.name, wanted=scheme.element.name)
        codes = self._elements(f"{name}_quantized", q.codes, scheme.element)
        stored, attributes = _granularity(q.scales[0], scheme.inner.tile, q.shape)
        inputs = [codes, self._scale(f"{name}_scale", stored, q)]
        if q.zero is not None:
            zero, _ = _granularity(q.zero, scheme.inner.tile, q.shape)
            inputs.append(self._codes(f"{name}_zero_point", zero, scheme.element))
        return self._dequantize(inputs, name, attributes)

    def static_input(self, name: str, scheme: Scheme, scale: float | None) -> str:
        """Add QuantizeLinear and DequantizeLinear of a graph input under a stored scale."""
        if scheme.element.bits != 8 or len(scheme.scales) != 1 or scheme.outer is None or scheme.zero:
            wanted = "one scale per tensor over an 8-bit element, such as fp8_tensor or int8_tensor"
            raise UsageError("not a static input scheme", where="input", got=scheme.name, wanted=wanted)
        if scale is None or not 0 < np.float32(scale) < np.inf:
            raise UsageError("an input scheme needs its static scale", got=scale, wanted="input_scale > 0")
        parameters = [
            self.floats(f"{name}_scale", np.array(scale, np.float32)),
            self._codes(f"{name}_zero_point", np.zeros((), np.uint8), scheme.element),
        ]
        quantized = self.node("QuantizeLinear", [name, *parameters], f"{name}_quantized")
        return self._dequantize([quantized, *parameters], f"{name}_dequantized", {})

    def save(
        self,
        path: str | os.PathLike[str],
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        outputs: Iterable[tuple[str, tuple[Any, ...]]],
    ) -> Path:
        """Write the model with FLOAT inputs and outputs of these names and shapes."""
        helper, kind = self._onnx.helper, self._onnx.TensorProto.FLOAT
        values = [
            [helper.make_tensor_value_info(name, kind, shape) for name, shape in end]
            for end in (inputs, outputs)
        ]
        graph = helper.make_graph(self._nodes, "narrowcast", *values, self._initializers)
        opsets = [helper.make_opsetid("", self._opset)]
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets),
            producer_name="narrowcast",
            producer_version=__version__,
        )
        return self._write(model, place(path))

    def _write(self, model: Any, path: Path) -> Path:
        """Write beside ``path``, then rename, so that a file of that name is always whole."""
        check_absent(path)
        staging, data = partial_path(path), path.name + ".data"
        outside = self._bytes > _ONE_FILE
        if outside:
            check_absent(path.with_name(data))
        try:
            staging.mkdir()
        except FileExistsError:
            raise UsageError(
                "an unfinished output is in the way", where=staging, remedy="remove it first"
            ) from None
        except OSError as error:
            raise storage_error(error, path, self._bytes) from error
        try:
            self._onnx.save_model(
                model, staging / path.name, save_as_external_data=outside, location=data if outside else None
            )
            for name in (data, path.name) if outside else (path.name,):  # the model last: it needs its data
                with open(staging / name, "rb") as file:
                    os.fsync(file.fileno())
                os.rename(staging / name, path.with_name(name))
            sync_directory(path.parent)
        except OSError as error:
            raise storage_error(error, path, self._bytes) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return path

    def _elements(self, name: str, codes: NDArray[np.uint8], element: Format) -> str:
        """The codes as DequantizeLinear's input; E2M1 as the module docstring says."""
        if element is not E2M1 or self._float4 == "float4":
            return self._codes(name, codes, element)
        types = self._onnx.TensorProto
        self._table = self._table or self.floats("e2m1_values", decode_table(E2M1))
        nibbles = self._codes(name, codes, UINT4)
        index = self.node("Cast", [nibbles], f"{name}_index", to=types.INT32)
        values = self.node("Gather", [self._table, index], f"{name}_values", axis=0)
        return self.node("Cast", [values], f"{name}_float8", to=types.FLOAT8E4M3FN)

    def _scale(self, name: str, stored: NDArray[Any], q: QTensor) -> str:
        """The product of the scale levels in fp32, the innermost given as ``stored``."""
        fmt = q.scheme.inner.format
        value = self._initializer(name, _known(fmt, SCALES, name), stored.shape, stored)
        if len(q.scales) == 1:
            return self._widen(value, fmt)
        outer, attributes = _granularity(q.scale_values(1), (0, 0), stored.shape)
        if fmt is E4M3FN and not q.scheme.scales[1].divides:
            return self._dequantize([value, self.floats(f"{name}_2", outer)], f"{name}_product", attributes)
        if outer.ndim == 1:  # these operators broadcast from the last axis on
            outer = outer.reshape(-1, *[1] * (stored.ndim - 1 - attributes["axis"]))
        op = "Div" if q.scheme.scales[1].divides else "Mul"
        return self.node(op, [self._widen(value, fmt), self.floats(f"{name}_2", outer)], f"{name}_product")

    def _widen(self, value: str, fmt: Format) -> str:
        if fmt is FP32:
            return value
        return self.node("Cast", [value], f"{value}_fp32", to=self._onnx.TensorProto.FLOAT)

    def _dequantize(self, inputs: list[str], output: str, attributes: Mapping[str, int]) -> str:
        if "block_size" in attributes:
            self._opset = max(self._opset, _BLOCKED)
        return self.node("DequantizeLinear", inputs, output, **attributes)

    def _codes(self, name: str, codes: NDArray[np.uint8], fmt: Format) -> str:
        """Add codes as an initializer: one run of bits without padding between rows, the first code lowest."""
        packed = pack(codes.reshape(1, -1), packing(fmt.bits))
        return self._initializer(name, _known(fmt, ELEMENTS, name), codes.shape, packed)

    def _initializer(
        self, name: str, kind: tuple[str, int], shape: tuple[int, ...], data: NDArray[Any]
    ) -> str:
        self._claim(name)
        spelling, opset = kind
        self._opset = max(self._opset, opset)
        tensor = self._onnx.TensorProto(
            name=name,
            data_type=getattr(self._onnx.TensorProto, spelling),
            dims=shape,
            raw_data=data.tobytes(),
        )
        self._bytes += len(tensor.raw_data)
        self._initializers.append(tensor)
        return name

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise UsageError("two values of the graph have the same name", got=name, remedy="rename a weight")
        self._names.add(name)


def _granularity(
    stored: NDArray[Any], tile: Tile, shape: tuple[int, ...]
) -> tuple[NDArray[Any], dict[str, int]]:
    """One value per tile of ``shape``, arranged as ONNX wants it, and DequantizeLinear's attributes for it.

    A scalar; one value per index of an axis; else one per block of the last axis, repeated along the other axes.
    """
    long = [axis for axis, size in enumerate(stored.shape) if size > 1]
    if not long:
        return stored.reshape(()), {}
    if len(long) == 1 and stored.shape[long[0]] == shape[long[0]]:
        return stored.reshape(-1), {"axis": long[0]}
    rows, cols = tile
    blocks = np.broadcast_to(spread(stored, (rows, 0), shape), (*shape[:-1], stored.shape[-1]))
    return blocks, {"axis": len(shape) - 1, "block_size": min(cols or shape[-1], shape[-1])}


def _known(fmt: Format, table: Mapping[str, tuple[str, int]], where: str) -> tuple[str, int]:
    """The ONNX type of a format, or the refusal."""
    if fmt.name not in table:
        raise UsageError("ONNX QDQ has no such type", where=where, got=fmt.name, wanted=", ".join(table))
    return table[fmt.name]


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise UsageError(
            "ONNX files need the package onnx", remedy="pip install 'narrowcast[onnx]'"
        ) from None
    if not hasattr(onnx.TensorProto, "INT2"):
        raise UsageError(
            "this onnx is too old", got=onnx.__version__, wanted="1.20 or later", remedy="pip install -U onnx"
        )
    return onnx
