"""ONNX QDQ files decode to the same bits in onnxruntime and in onnx's own evaluator as here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from narrowcast.containers import onnx_qdq
from narrowcast.containers.onnx_qdq import ELEMENTS, export, export_linear
from narrowcast.errors import InputError, StorageError, UsageError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import decode, decode_table, encode
from narrowcast.numbers.formats import E8M0, FP16, FP32, formats
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import scales_shape
from narrowcast.tensors.schemes import Scale, Scheme, as_peer, schemes

DOC = Path(__file__).parents[2] / "docs" / "onnx.md"
WRITTEN = [scheme for scheme in schemes.values() if scheme.element.name in ELEMENTS]
REFUSED = [scheme.name for scheme in schemes.values() if scheme.element.name not in ELEMENTS]
DOCUMENTED = (
    "fp8_tensor", "fp8_channel", "fp8_group128", "fp8_block128", "fp8_block128_ue8m0", "int8_channel", "int4_channel",
    "int4_g128", "uint4_g128", "mxfp8_e4m3", "mxfp4", "nvfp4",
)  # fmt: skip
FURTHER = [
    *(
        replace(schemes[f"fp8_{tile}"], name=f"{element}_{tile}", element=formats[element])
        for element in ("e5m2", "e4m3fnuz", "e5m2fnuz", "uint8", "int2", "uint2", "e2m1")
        for tile in ("tensor", "channel", "group128", "block128")
    ),
    replace(as_peer(schemes["nvfp4"], "compressed-tensors"), name="nvfp4_dividing"),
    replace(schemes["int4_g32"].with_scale_format(FP16), name="int4_g32_fp16"),
    replace(schemes["uint4_g32"], name="uint4_block32", scales=(Scale(FP32, (32, 32), "minmax", 15.0),)),
]
SHAPES = [
    (6, 256),
    (130, 201),
    (3, 5, 48),
    (1, 16),
]  # ragged and odd; experts; one tile that is the whole tensor

onnxruntime.set_default_logger_severity(4)  # refusals are expected here, and are raised as well as logged


def run(path: Path, **feeds: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def evaluate(path: Path, **feeds: np.ndarray) -> list[np.ndarray]:
    return ReferenceEvaluator(onnx.load(path)).run(None, feeds)


def assert_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bit for bit, but any NaN is any other NaN."""
    assert got.dtype == wanted.dtype == np.float32
    assert got.shape == wanted.shape
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


def random_tensor(scheme: Scheme, shape: tuple[int, ...]) -> QTensor:
    """Every code is likely, specials included, under scales of many magnitudes."""
    rng = np.random.default_rng(len(shape))
    codes = rng.integers(0, 1 << scheme.element.bits, shape).astype(np.uint8)
    scales = []
    for level, grid in zip(scheme.scales, scales_shape(shape, scheme), strict=True):
        values = np.exp2(rng.uniform(-8, 8, grid))
        scales.append(
            values.astype(np.float32) if level.format is FP32 else encode(values, level.format).codes
        )
    zero = None
    if scheme.zero is not None:
        zero = rng.integers(0, 1 << scheme.zero.bits, scales[0].shape).astype(np.uint8)
    return QTensor(scheme, codes, tuple(scales), zero)


def one(scheme: str | Scheme, values: Any) -> QTensor:
    """Codes under scales of one."""
    scheme = schemes[scheme] if isinstance(scheme, str) else scheme
    codes = encode(np.asarray(values, np.float64), scheme.element).codes
    return QTensor(scheme, codes, (np.ones(scales_shape(codes.shape, scheme)[0], np.float32),))


@pytest.mark.parametrize("scheme", WRITTEN + FURTHER, ids=lambda scheme: scheme.name)
def test_decoded_weights_are_ours_bit_for_bit(scheme: Scheme, tmp_path: Path) -> None:
    weights = {f"layer.{i}.weight": random_tensor(scheme, shape) for i, shape in enumerate(SHAPES)}
    path = export(weights, tmp_path / "weights.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    for decoded in (run(path), evaluate(path)):
        for got, q in zip(decoded, weights.values(), strict=True):
            assert_bits(got, q.dequantize())
    assert [value.name for value in onnx.load(path).graph.output] == list(weights)
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.onnx"]


@pytest.mark.parametrize("scheme", ["nvfp4", "int4_g128", "uint4_g64", "fp8_block128", "mxfp4", "mxfp8"])
def test_a_quantized_weight_decodes_to_what_we_say(scheme: str, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((40, 192)).astype(np.float32)
    q = quantize(x, schemes[scheme])
    assert_bits(run(export({"w": q}, tmp_path / "w.onnx"))[0], q.dequantize())


def test_every_e8m0_scale_is_widened_exactly(tmp_path: Path) -> None:
    scheme = schemes["mxfp8_e4m3"]
    codes = np.full((256, 32), 0x38, np.uint8)  # 1.0
    q = QTensor(scheme, codes, (np.arange(256, dtype=np.uint8).reshape(256, 1),))
    path = export({"w": q}, tmp_path / "w.onnx")
    for decoded in (run(path), evaluate(path)):
        assert_bits(decoded[0][:, 0], decode_table(E8M0).astype(np.float32))


@pytest.mark.parametrize("name", [name for name in ELEMENTS if formats[name].bits >= 4])
def test_initializers_are_what_onnx_itself_reads(name: str, tmp_path: Path) -> None:
    fmt = formats[name]
    scheme = Scheme(name, fmt, (Scale(FP32, (0, 0), "amax"),))
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)[
        None, :-1
    ]  # an odd count, so the last byte is half empty
    q = QTensor(scheme, codes, (np.ones((1, 1), np.float32),))
    model = onnx.load(export({"w": q}, tmp_path / "w.onnx", float4="float4"))
    tensor = next(entry for entry in model.graph.initializer if entry.name == "w_quantized")
    assert TensorProto.DataType.Name(tensor.data_type) == ELEMENTS[name][0]
    read = numpy_helper.to_array(tensor).astype(np.float32)
    assert_bits(read, decode(codes, fmt))


def test_nibbles_lie_low_first_without_padding_between_rows(tmp_path: Path) -> None:
    scheme = Scheme("int4", formats["int4"], (Scale(FP32, (0, 0), "amax"),))
    path = export({"w": one(scheme, [[1, -8, 7], [2, -1, 3]])}, tmp_path / "w.onnx")
    tensor = next(entry for entry in onnx.load(path).graph.initializer if entry.name == "w_quantized")
    assert tensor.raw_data == bytes([0x81, 0x27, 0x3F])


@pytest.mark.parametrize(
    ("element", "wanted"), [("e4m3fn", [0, 0.5, 1, 448, 96]), ("e5m2", [0, 0.5, 1, 49152, 96])]
)
def test_the_standards_own_vectors_of_float8(element: str, wanted: list[float], tmp_path: Path) -> None:
    scheme = replace(schemes["fp8_tensor"], element=formats[element])
    path = export_linear(
        one("int8_tensor", np.eye(5)), tmp_path / "l.onnx", input=scheme, input_scale=2.0
    )  # the identity, so that Y is the input as the scheme keeps it
    x = np.array([[0, 1, 2, 100000, 200]], np.float32)
    for y in (run(path, X=x), evaluate(path, X=x)):
        assert y[0].tolist() == [[2 * value for value in wanted]]


def test_the_standards_own_vector_of_float4(tmp_path: Path) -> None:
    x = np.array([[0, 2.5, 4.8, 8.6], [-30, -20, 6, 9], [-0.0, -2.5, -4.8, -8.6]], np.float32)
    scale = np.array([[2], [3], [4]], np.float32)
    wanted = np.array([[0, 1, 2, 4], [-6, -6, 2, 3], [0, -0.5, -1, -2]])
    scheme = replace(schemes["fp8_channel"], element=formats["e2m1"])
    q = QTensor(scheme, encode(x / scale, scheme.element).codes, (scale,))
    np.testing.assert_array_equal(run(export({"w": q}, tmp_path / "table.onnx"))[0], wanted * scale)
    path = export({"w": q}, tmp_path / "float4.onnx", float4="float4")
    onnx.checker.check_model(str(path), full_check=True)
    np.testing.assert_array_equal(evaluate(path)[0], wanted * scale)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_the_type_float4_decodes_equally_and_onnxruntime_refuses_it(scheme: str, tmp_path: Path) -> None:
    q = random_tensor(schemes[scheme], (7, 40))
    path = export({"w": q}, tmp_path / "w.onnx", float4="float4")
    onnx.checker.check_model(str(path), full_check=True)
    assert_bits(evaluate(path)[0], q.dequantize())
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented):
        run(path)


INPUTS = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "int8", "uint8"]


@pytest.mark.parametrize("element", INPUTS)
@pytest.mark.parametrize("scale", [1.0, 0.011])
def test_static_inputs_are_rounded_as_we_round(element: str, scale: float, tmp_path: Path) -> None:
    fmt, scheme = formats[element], replace(schemes["fp8_tensor"], element=formats[element])
    path = export_linear(one("int8_tensor", [[1]]), tmp_path / "l.onnx", input=scheme, input_scale=scale)
    table = decode_table(fmt)
    values = np.unique(table[np.isfinite(table)])
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2, 1.07 * values[[0, -1]]]).astype(
        np.float32
    )
    around = [np.nextafter(edges, np.float32(end)) for end in (-np.inf, np.inf)]
    x = (np.concatenate([edges, *around, np.float32([1e9, -1e9])]) * np.float32(scale))[:, None]
    wanted = decode(encode(x / np.float32(scale), fmt).codes, fmt) * np.float32(scale)
    for y in (run(path, X=x), evaluate(path, X=x)):
        np.testing.assert_array_equal(y[0], wanted)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "int8_channel", "int4_g32", "uint4_g32", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("input", [None, "fp8_tensor", "int8_tensor"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(scheme: str, input: str | None, with_bias: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    n, k = 32, 128
    q = quantize(rng.standard_normal((n, k)).astype(np.float32), schemes[scheme])
    bias = rng.standard_normal(n).astype(np.float32) if with_bias else None
    x, scale = rng.standard_normal((5, k)).astype(np.float32), np.float32(0.02)
    chosen = schemes[input] if input else None
    path = export_linear(q, tmp_path / "l.onnx", bias, chosen, input_scale=float(scale) if chosen else None)
    onnx.checker.check_model(str(path), full_check=True)
    seen = x
    if chosen:
        seen = decode(encode(x / scale, chosen.element).codes, chosen.element) * scale
    weight, offset = q.dequantize().astype(np.float64), 0.0 if bias is None else bias.astype(np.float64)
    exact = seen.astype(np.float64) @ weight.T + offset
    # Any order of k products and sums in fp32, and the bias: Higham's γ with unit roundoff 2^-24.
    steps = (k + 1) * 2.0**-24
    bound = steps / (1 - steps) * (np.abs(seen).astype(np.float64) @ np.abs(weight).T + np.abs(offset))
    for y in (run(path, X=x)[0], evaluate(path, X=x)[0]):
        assert y.shape == (5, n)
        assert (np.abs(y - exact) <= bound).all()


@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel"])
def test_linear_is_exact_where_fp32_is(scheme: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    w, x = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 64), (4, 64)))
    bias = np.arange(16, dtype=np.float32)
    path = export_linear(one(scheme, w), tmp_path / "l.onnx", bias, schemes["fp8_tensor"], input_scale=0.5)
    for y in (run(path, X=x)[0], evaluate(path, X=x)[0]):
        np.testing.assert_array_equal(y, x @ w.T + bias)  # integers below 2^24


def test_large_weights_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_qdq, "_ONE_FILE", 1000)
    q = random_tensor(schemes["int8_channel"], (64, 64))
    path = export({"w": q}, tmp_path / "w.onnx")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["w.onnx", "w.onnx.data"]
    assert path.stat().st_size < 1000
    onnx.checker.check_model(str(path), full_check=True)
    assert_bits(run(path)[0], q.dequantize())
    path.unlink()
    with pytest.raises(UsageError, match="exists already"):
        export({"w": q}, path)


def test_the_file_is_a_function_of_its_contents(tmp_path: Path) -> None:
    q = random_tensor(schemes["nvfp4"], (8, 64))
    first, second = (export({"w": q}, tmp_path / name) for name in ("a.onnx", "b.onnx"))
    assert first.read_bytes() == second.read_bytes()


Q = random_tensor(schemes["int8_channel"], (4, 32))
UNTYPED_ZERO = replace(schemes["uint4_g32"], zero=formats["int8"])
FP8 = schemes["fp8_tensor"]


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        *(
            (lambda p, n=name: export({"w": random_tensor(schemes[n], (4, 64))}, p), "no such type")
            for name in REFUSED
        ),
        (lambda p: export({"w": random_tensor(UNTYPED_ZERO, (4, 32))}, p), "zero point in the type"),
        (lambda p: export({"w": Q.rows(0, 2), "w_scale": Q}, p), "same name"),
        (
            lambda p: export({"e2m1_values": Q, "w": random_tensor(schemes["nvfp4"], (4, 32))}, p),
            "same name",
        ),
        (lambda p: export({}, p), "nothing to export"),
        (lambda p: export({"w": Q}, p, float4="fp4"), "unknown way to store float4"),
        (lambda p: export({"w": Q}, p / "deeper.onnx"), "the directory does not exist"),
        (lambda p: export_linear(random_tensor(Q.scheme, (2, 4, 32)), p), "one matrix"),
        (lambda p: export_linear(Q, p, np.zeros(3, np.float32)), "bias does not fit"),
        (lambda p: export_linear(Q, p, input=FP8), "needs its static scale"),
        (lambda p: export_linear(Q, p, input=FP8, input_scale=0.0), "needs its static scale"),
        (lambda p: export_linear(Q, p, input=FP8, input_scale=float("nan")), "needs its static scale"),
        (lambda p: export_linear(Q, p, input_scale=1.0), "without an input scheme"),
        (lambda p: export_linear(Q, p, input=schemes["fp8_token"], input_scale=1.0), "not a static input"),
        (lambda p: export_linear(Q, p, input=schemes["nvfp4"], input_scale=1.0), "not a static input"),
    ],
)
def test_refusals_leave_nothing_behind(attempt: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, InputError, StorageError), match=words):
        attempt(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_what_exists_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        export({"w": Q}, path)
    assert path.read_text() == "mine"
    (tmp_path / "n.onnx.partial").mkdir()
    with pytest.raises(UsageError, match="unfinished output"):
        export({"w": Q}, tmp_path / "n.onnx")


def test_onnx_is_imported_only_to_write_and_its_absence_is_told() -> None:
    program = """
import sys
from narrowcast.containers.onnx_qdq import export
from narrowcast.errors import UsageError
assert "onnx" not in sys.modules
sys.modules["onnx"] = None
try:
    export({"w": None}, "never.onnx")
except UsageError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'narrowcast[onnx]'" in told


_REFUSAL = re.compile(r"NOT_IMPLEMENTED.*?(?= node with name|$)", re.MULTILINE)


def first_opset(element: str, granularity: str, scale: str = "FLOAT", direct: bool = True) -> str:
    """The lowest opset at which onnxruntime runs one DequantizeLinear, or its refusal at the first that has it."""
    bits = {"FLOAT6E2M3": 6, "FLOAT6E3M2": 6}.get(element, 8)
    bits = next((formats[name].bits for name, (spelling, _) in ELEMENTS.items() if spelling == element), bits)
    shape = [4, 64]
    scales = {"per tensor": [], "per axis": [4], "blocked": [4, 2]}[granularity]
    where = {"per tensor": {}, "per axis": {"axis": 0}, "blocked": {"axis": 1, "block_size": 32}}[granularity]
    width = {"FLOAT": 4, "FLOAT16": 2, "BFLOAT16": 2, "FLOAT8E8M0": 1}[scale]
    initializers = [
        TensorProto(name="x", dims=shape, data_type=getattr(TensorProto, element), raw_data=bytes(32 * bits)),
        TensorProto(
            name="s",
            dims=scales,
            data_type=getattr(TensorProto, scale),
            raw_data=bytes(width * int(np.prod(scales))),
        ),
    ]
    nodes = []
    if not direct:
        nodes.append(helper.make_node("Cast", ["s"], ["wide"], to=TensorProto.FLOAT))
    elif scale != "FLOAT":
        where = where | {"output_dtype": TensorProto.FLOAT}
    nodes.append(helper.make_node("DequantizeLinear", ["x", "s" if direct else "wide"], ["y"], **where))
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "one", [], output, initializers)
    refusal = None
    for opset in (19, 21, 23, 24, 25, 28):
        opsets = [helper.make_opsetid("", opset)]
        version = helper.find_min_ir_version_for(opsets)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version)
        try:
            onnx.checker.check_model(model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue  # not in the standard at this opset
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            return f"opset {opset}"
        except Exception as error:
            refusal = refusal or f"refused: `{_REFUSAL.search(str(error))[0].strip()}`"
    assert refusal is not None
    return refusal


def doc_rows() -> list[str]:
    """The rows of docs/onnx.md, measured."""
    rows = []
    for element in [spelling for spelling, _ in ELEMENTS.values()] + ["FLOAT6E2M3", "FLOAT6E3M2"]:
        cells = [first_opset(element, granularity) for granularity in ("per tensor", "per axis", "blocked")]
        rows.append(f"| {element} | {' | '.join(cells)} |")
    for scale in ("FLOAT", "FLOAT16", "BFLOAT16", "FLOAT8E8M0"):
        direct = first_opset("FLOAT8E4M3FN", "blocked", scale)
        cast = "none needed" if scale == "FLOAT" else first_opset("FLOAT8E4M3FN", "blocked", scale, False)
        rows.append(f"| {scale} | {direct} | {cast} |")
    return rows


def scheme_rows(folder: Path) -> list[str]:
    """What export writes for a matrix in some schemes, as rows of docs/onnx.md."""
    rows = []
    for scheme in (schemes[name] for name in DOCUMENTED):
        graph = onnx.load(export({"w": random_tensor(scheme, (256, 256))}, folder / f"{scheme.name}.onnx"))
        types = {entry.name: TensorProto.DataType.Name(entry.data_type) for entry in graph.graph.initializer}
        nodes = " → ".join(node.op_type for node in graph.graph.node)
        held = ", ".join(types[name] for name in types if name != "e2m1_values")
        rows.append(f"| {scheme.name} | {held} | {nodes} | {graph.opset_import[0].version} |")
    return rows


def test_the_documents_tables_are_what_is_measured(tmp_path: Path) -> None:
    text = DOC.read_text()
    assert f"onnxruntime {onnxruntime.__version__}" in text
    assert [row for row in doc_rows() + scheme_rows(tmp_path) if row not in text] == []
