"""Test vectors for people who write kernels: operands, codes, scales, layouts and the product, to the bit.

    x, w  →  codes, scales  →  packed bytes, swizzled scales
                            →  x_decoded, w_decoded  →  y = x_decoded · w_decodedᵀ

One .npz and one C header hold the same arrays. ``y`` is the definition of kernels/reference/gemm; ``y_exact``
and ``y_bound`` judge a kernel that adds in its own order: |y - y_exact| ≤ y_bound.

The same arguments give the same bytes on every machine: samples come from integers of PCG64, whose stream numpy
keeps, as sums of four 16-bit numbers (bell-shaped, no logarithm whose last bit depends on a library), times
powers of two that differ from tile to tile, so that a scale in the wrong place shows. Where the scheme has more
than one tile, the last is zero.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels.reference import gemm
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import decode, to_bf16
from narrowcast.numbers.formats import BF16
from narrowcast.store.writer import storage_error
from narrowcast.tensors.layouts import by_row, layouts_of
from narrowcast.tensors.packing import pack, packing
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme, Shape, schemes, tile_grid

LARGEST = 1 << 20  # elements of x, w and y together: a C header of about 60 MB
MOST_PRODUCTS = 1 << 26  # the exact sum takes some 50 ns for each
SCALES_AFTER = 8  # roundings of decoding two operands of two scale levels, and of four later products
PER_LINE = 12


@dataclass(frozen=True)
class Array:
    """One array of the vectors and what it means."""

    data: NDArray[Any]
    meaning: str


@dataclass(frozen=True)
class Vectors:
    """What ``narrowcast vectors`` makes: arrays by name, and the facts a reader needs to use them.

    ``stem`` names the files and prefixes the C names; ``shape`` is (M, N, K).
    """

    stem: str
    title: str
    linear: LinearScheme
    shape: Shape
    seed: int
    roundings: int
    arrays: Mapping[str, Array]

    @property
    def worst(self) -> float:
        """Largest |y - y_exact| / y_bound: how much of what it may err the serial sum errs."""
        error = np.abs(self.arrays["y"].data - self.arrays["y_exact"].data)
        return float((error / self.arrays["y_bound"].data).max())

    def to_json(self) -> dict[str, Any]:
        m, n, k = self.shape
        inputs = self.linear.input
        return {
            "title": self.title,
            "weight": self.linear.weight.name,
            "input": inputs.name if inputs else None,
            "accumulate": self.linear.accumulate,
            "shape": {"M": m, "N": n, "K": k},
            "seed": self.seed,
            "roundings": self.roundings,
            "worst": self.worst,
            "arrays": {
                name: {"dtype": str(a.data.dtype), "shape": a.data.shape, "meaning": a.meaning}
                for name, a in self.arrays.items()
            },
        }


@dataclass(frozen=True)
class Written:
    """A file that was written: its path, size in bytes and SHA-256."""

    path: Path
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "bytes": self.size, "sha256": self.sha256}


def vectors(name: str, shape: Shape, seed: int = 0, inputs: str | None = None) -> Vectors:
    """Vectors of a scheme or preset by name for x [M, K] and w [N, K], ``shape`` being (M, N, K).

    A preset brings the input's scheme; so does a scheme whose name is a preset's too. Other schemes leave x wide
    (bf16) unless ``inputs`` names the input's scheme. Raises UsageError on names that are unknown or contradict
    each other, and on shapes that are too large for a file to read in a debugger.
    """
    title, linear = settle(name, inputs)
    m, n, k = _checked(shape)
    x = _drawn(m, k, (seed, 0), linear.input)
    w = _drawn(n, k, (seed, 1), linear.weight)
    qw = quantize(w, linear.weight, source=BF16)
    qx: NDArray[np.float32] | QTensor = (
        quantize(x, linear.input, source=BF16) if linear.input is not None else x
    )
    y = gemm.gemm(qx, qw, linear.accumulate)
    roundings = gemm.roundings(qx, qw, linear.accumulate)
    if linear.accumulate == "fp32":
        roundings += SCALES_AFTER
    wide_x, wide_w = gemm.decoded(qx), gemm.decoded(qw)
    arrays = {"x": Array(x, "input [M, K], exact in bf16"), "w": Array(w, "weight [N, K], exact in bf16")}
    arrays |= _operand("x", "m", qx) if isinstance(qx, QTensor) else {}
    arrays |= _operand("w", "n", qw)
    arrays |= {
        "y": Array(y, f"[M, N] = {_product(linear)}"),
        "y_bf16": Array(to_bf16(y), "y rounded once to bf16, nearest even, as bit patterns"),
        "y_exact": Array(
            gemm.oracle(wide_x, wide_w), "exact sum of the decoded products, rounded once to fp64"
        ),
        "y_bound": Array(gemm.bound(wide_x, wide_w, roundings), _bound(linear, roundings)),
    }
    stem = re.sub(r"\W", "_", f"{title.lower()}_{m}x{n}x{k}" + (f"_seed{seed}" if seed else ""))
    return Vectors(stem, title, linear, shape, seed, roundings, arrays)


def settle(name: str, inputs: str | None) -> tuple[str, LinearScheme]:
    """The name of what is computed and the computation."""
    both = name in schemes and name in presets
    if name in presets and not (both and inputs):
        preset = presets[name]
        if inputs:
            remedy = f"leave --input away, or name the weight's scheme: {preset.linear.weight.name}"
            raise UsageError("the preset brings the input's scheme", got=f"--input {inputs}", remedy=remedy)
        if preset.kv:
            raise UsageError(
                "a linear layer has no KV cache", got=name, remedy=f"use {name.partition('+')[0]}"
            )
        return preset.name, preset.linear
    if name not in schemes:
        remedy = "`narrowcast schemes` and `narrowcast presets` list them"
        raise UsageError("no scheme and no preset has this name", got=name, remedy=remedy)
    weight = schemes[name]
    if inputs is None:
        return weight.name, LinearScheme(weight)
    scheme = schemes[inputs]
    whole = gemm.sums_integers(weight) and gemm.sums_integers(scheme)
    linear = LinearScheme(weight, scheme, accumulate="int32" if whole else "fp32")
    return f"{weight.name}_{scheme.name}", linear


def _checked(shape: Shape) -> Shape:
    if len(shape) != 3:
        raise UsageError(
            "not the shape of a product", got="x".join(map(str, shape)), wanted="MxNxK, such as 16x128x512"
        )
    m, n, k = shape
    for what, count, most in (
        ("elements of x, w and y", m * k + n * k + m * n, LARGEST),
        ("products", m * n * k, MOST_PRODUCTS),
    ):
        if count > most:
            remedy = "vectors are for tests; every tile of a kernel shows in a smaller shape"
            raise UsageError(f"too many {what}", got=count, wanted=f"{most} at most", remedy=remedy)
    return shape


def _drawn(rows: int, k: int, seed: tuple[int, int], scheme: Scheme | None) -> NDArray[np.float32]:
    """Bell-shaped samples times 2^-4 to 2^3 by row and 16 columns, exact in bf16; see the module docstring."""
    bits = np.random.PCG64(seed)
    words = bits.random_raw(rows * k).astype("<u8").view("<u2").reshape(rows, k, 4)
    bell = words.sum(axis=-1, dtype=np.int64) - 2 * 65535
    powers = bits.random_raw(rows * -(-k // 16)).reshape(rows, -1) % np.uint64(8)
    exponents = np.repeat(powers.astype(np.int64), 16, axis=1)[:, :k] - 4 - 15
    x = decode(to_bf16(np.ldexp(bell.astype(np.float32), exponents.astype(np.int32))), BF16)
    if scheme is not None:
        down, across = tile_grid((rows, k), scheme.inner.tile)
        height, width = scheme.inner.tile
        if down * across > 1:
            x[(down - 1) * height :, (across - 1) * width :] = 0
    return x


def _operand(name: str, row: str, q: QTensor) -> dict[str, Array]:
    """Arrays of one quantized operand; ``row`` is the letter of its row index."""
    scheme = q.scheme
    bits, per_scale = scheme.element.bits, _index(scheme.inner.tile, row)
    made = {
        "codes": Array(q.codes, f"{scheme.element.name} bit patterns, one a byte"),
        "packed": Array(
            pack(q.codes, packing(bits)), f"codes as rows of {bits}-bit fields, the first in the lowest bits"
        ),
        "scales": Array(q.scales[0], f"{scheme.inner.format.name} scales as stored, index {per_scale}"),
    }
    rows = by_row(q.scales[0], scheme.inner.tile, q.shape[0])
    for layout in layouts_of(scheme):
        words = f"{layout.formula}; pads {layout.pads} with zeros"
        if scheme.inner.tile[0] > 1:
            words = f"one row of scales per row, then {words}"
        made[f"scales_{layout.name}"] = Array(layout.swizzle(rows), words)
    if len(q.scales) == 2:
        made["outer"] = Array(q.scales[1], f"{scheme.scales[1].format.name} scale of the whole tensor")
    if q.zero is not None and scheme.zero is not None:
        made["zero"] = Array(q.zero, f"{scheme.zero.name} zero points, index {per_scale}")
    made["decoded"] = Array(q.dequantize(), _decoding(q, per_scale))
    return {f"{name}_{part}": array for part, array in made.items()}


def _index(tile: tuple[int, int], row: str) -> str:
    """Where the scale of element [row, k] is found: ``[n / 128, k / 128]``."""
    down, across = (
        "0" if size == 0 else letter if size == 1 else f"{letter} / {size}"
        for letter, size in zip((row, "k"), tile, strict=True)
    )
    return f"[{down}, {across}]"


def _decoding(q: QTensor, per_scale: str) -> str:
    element = f"(code - zero{per_scale})" if q.zero is not None else "value of the code"
    scale = f"(scales{per_scale} * outer)" if len(q.scales) == 2 else f"scales{per_scale}"
    return f"{element} * {scale}, every operation rounded to fp32"


def _product(linear: LinearScheme) -> str:
    if linear.accumulate == "int32":
        return (
            "sum over the stretches of k on which both scales are constant of fp32(sum of x code * w code in "
            "int32) * (x scale * w scale), every operation rounded to fp32, stretches added in order from 0"
        )
    x = "x" if linear.input is None else "x_decoded"
    return (
        f"sum over k of {x}[m, k] * w_decoded[n, k]: product rounded to fp32, then added in fp32, k ascending "
        "from 0, no fused multiply-add"
    )


def _bound(linear: LinearScheme, n: int) -> str:
    sums = "with sums rounded to nearest fp32 in any order, fused or not, and scales multiplied in before or after them"
    if linear.accumulate == "int32":
        sums = "with exact int32 sums and their stretches added in any order"
    return (
        f"most that |y - y_exact| may be {sums}: g * sum of |x||w| + K * 2^-149, g = n u / (1 - n u), "
        f"n = {n}, u = 2^-24"
    )


def write(made: Vectors, out: str | os.PathLike[str] = ".") -> tuple[Written, ...]:
    """Write STEM.npz and STEM.h into the directory ``out``, which is made if need be.

    A file that is there already with the same bytes is left alone; one with others is a UsageError before
    anything is written. StorageError where the disk refuses.
    """
    folder = Path(out)
    contents = {folder / f"{made.stem}.npz": npz(made), folder / f"{made.stem}.h": header(made).encode()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            if path.exists() and path.read_bytes() != content:
                raise UsageError("another file is there", where=path, remedy="choose another --out")
        for path, content in contents.items():
            if not path.exists():
                unfinished = path.with_name(path.name + ".tmp")
                unfinished.write_bytes(content)
                unfinished.replace(path)
    except OSError as error:
        raise storage_error(error, folder, sum(map(len, contents.values()))) from None
    return tuple(Written(path, len(c), hashlib.sha256(c).hexdigest()) for path, c in contents.items())


def npz(made: Vectors) -> bytes:
    """The arrays as an uncompressed .npz whose members carry no time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        for name, array in made.arrays.items():
            with members.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                np.lib.format.write_array(member, array.data, allow_pickle=False)
    return buffer.getvalue()


_C_TYPES = {"u1": "uint8_t", "u2": "uint16_t", "i4": "uint32_t", "f4": "float", "f8": "double"}
_BYTES = [f"0x{value:02x}" for value in range(256)]


def header(made: Vectors) -> str:
    """The arrays as a C99 header: static const arrays in row-major order, floats as hexadecimal literals."""
    m, n, k = made.shape
    guard = f"{made.stem.upper()}_H"
    inputs = made.linear.input.name if made.linear.input else "wide"
    lines = [
        *_comment(f"{made.title}: y[M, N] = x[M, K] * w[N, K]^T, inputs {inputs}, weights {made.linear.weight.name}, "
                  f"accumulated in {made.linear.accumulate}, seed {made.seed}. Arrays are row-major, floats "
                  "hexadecimal and exact. In formulas of layouts m and k are row and column of the scales; / on "
                  "indices rounds down."),
        f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", "",
        f"enum {{ {made.stem}_M = {m}, {made.stem}_N = {n}, {made.stem}_K = {k} }};",
    ]  # fmt: skip
    for name, array in made.arrays.items():
        kind, sizes = array.data.dtype.str[1:], [str(size) for size in array.data.shape]
        lines += [
            "", *_comment(f"{name} [{', '.join(sizes)}]: {array.meaning}"),
            f"static const {_C_TYPES[kind]} {made.stem}_{name}[{' * '.join(sizes)}] = {{",
            *_literals(array.data.ravel(), kind), "};",
        ]  # fmt: skip
    return "\n".join([*lines, "", f"#endif /* {guard} */"]) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(f"{text} */", 100, initial_indent="/* ", subsequent_indent="   ")


def _literals(flat: NDArray[Any], kind: str) -> Iterator[str]:
    if kind == "u1":
        words = [_BYTES[value] for value in flat.tolist()]
    elif kind in ("u2", "i4"):
        width = 4 if kind == "u2" else 8
        words = [f"0x{value:0{width}x}" for value in flat.view(f"u{kind[1]}").tolist()]
    else:
        suffix = "f" if kind == "f4" else ""
        words = [_hexadecimal(value) + suffix for value in flat.tolist()]
    for first in range(0, len(words), PER_LINE):
        yield "    " + ", ".join(words[first : first + PER_LINE]) + ","


def _hexadecimal(value: float) -> str:
    """The shortest hexadecimal literal of a finite float."""
    digits, _, exponent = value.hex().partition("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}"
