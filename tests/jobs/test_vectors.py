"""Test vectors: the same bytes for the same arguments, and a C program that derives everything from the header.

The program below knows the formats, the scales, the layouts and the order of the sum from their definitions
alone; it is compiled as C99, where gcc fuses no product with a sum, and compares every array bit for bit.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from narrowcast.errors import StorageError, UsageError
from narrowcast.jobs.vectors import LARGEST, Vectors, header, npz, settle, vectors, write
from narrowcast.kernels.reference.gemm import gemm
from narrowcast.tensors.layouts import by_row, layouts
from narrowcast.tensors.packing import packing, unpack
from narrowcast.tensors.presets import presets
from narrowcast.tensors.schemes import Scheme, schemes

GCC = shutil.which("gcc")
FLAGS = ["-std=c99", "-Wall", "-Werror", "-O1"]

PROGRAM = r"""
#include HEADER
#include <math.h>
#include <stdio.h>
#include <string.h>
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define V(name) JOIN(STEM, name)
enum { M = V(M), N = V(N), K = V(K) };
#define FAIL(what) return printf("%s differs at row %d column %d\n", what, row, k), 1

float fp32(float value) { return value; }
float bf16(unsigned c) { uint32_t b = c << 16; float f; memcpy(&f, &b, 4); return f; }
float e8m0(unsigned c) { return ldexpf(1, (int)c - 127); }
float e4m3fn(unsigned c) {
    int e = c >> 3 & 15, m = c & 7;
    float size = e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return c & 128 ? -size : size;
}
float e2m1(unsigned c) {
    int e = c >> 1 & 3, m = c & 1;
    float size = e ? ldexpf(2 + m, e - 2) : 0.5f * m;
    return c & 8 ? -size : size;
}
float e2m3(unsigned c) {
    int e = c >> 3 & 3, m = c & 7;
    float size = e ? ldexpf(8 + m, e - 4) : ldexpf(m, -3);
    return c & 32 ? -size : size;
}
float int8(unsigned c) { return c & 128 ? (float)c - 256 : c; }
float int4(unsigned c) { return c & 8 ? (float)c - 16 : c; }

#define OPERAND(p, ROWS, HIGH, WIDE, COLUMNS, ELEMENT, BITS, SCALE, OUTER) \
static float p##_scale(int row, int k) { \
    return SCALE(V(p##_scales)[row / HIGH * COLUMNS + k / WIDE]) OUTER; \
} \
static int p##_check(void) { \
    for (int row = 0; row < ROWS; row++) for (int k = 0; k < K; k++) { \
        unsigned code = V(p##_codes)[row * K + k], packed = 0; \
        float value = ELEMENT(code) * p##_scale(row, k); \
        if (value != V(p##_decoded)[row * K + k]) FAIL(#p "_decoded"); \
        const uint8_t *line = V(p##_packed) + row * ((K * BITS + 7) / 8); \
        for (int bit = 0; bit < BITS; bit++) \
            packed |= (line[(k * BITS + bit) / 8] >> (k * BITS + bit) % 8 & 1u) << bit; \
        if (packed != code) FAIL(#p "_packed"); \
    } \
    return 0; \
}
#define SWIZZLED(p, array, check, ROWS, HIGH, COLUMNS, OFFSET) \
static int check(void) { \
    const uint8_t *bytes = (const uint8_t *)V(array); \
    unsigned long all = 0, sum = 0; \
    for (unsigned long i = 0; i < sizeof(V(array)); i++) all += bytes[i]; \
    for (int row = 0; row < ROWS; row++) for (int k = 0; k < COLUMNS; k++) { \
        sum += bytes[OFFSET(ROWS, COLUMNS)]; \
        if (bytes[OFFSET(ROWS, COLUMNS)] != V(p##_scales)[row / HIGH * COLUMNS + k]) FAIL(#array); \
    } \
    return all != sum; /* bytes of the padding */ \
}
#define SF_128X4(R, C) (row / 128 * ((C + 3) / 4) + k / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + k % 4
#define UE8M0(R, C) (k / 4 * ((R + 3) / 4 * 4) + row) * 4 + k % 4
OPERANDS

static float product(int row, int n) {
    float sum = 0;
#ifdef INT32
    for (int first = 0; first < K; first += INT32) {
        int codes = 0;
        for (int k = first; k < K && k < first + INT32; k++)
            codes += (int)X_ELEMENT(V(x_codes)[row * K + k]) * (int)W_ELEMENT(V(w_codes)[n * K + k]);
        sum += (float)codes * (x_scale(row, first) * w_scale(n, first));
    }
#else
    for (int k = 0; k < K; k++) sum += V(X)[row * K + k] * V(w_decoded)[n * K + k];
#endif
    return sum;
}
int main(void) {
    if (CHECKS) return 1;
    for (int row = 0; row < M; row++) for (int k = 0; k < N; k++) {
        float y = product(row, k);
        uint32_t bits, low;
        if (memcmp(&y, &V(y)[row * N + k], 4)) FAIL("y");
        memcpy(&bits, &y, 4);
        low = bits & 0xffff, bits >>= 16;
        bits += low > 0x8000 || (low == 0x8000 && bits & 1);
        if (bits != V(y_bf16)[row * N + k]) FAIL("y_bf16");
        if (!(fabs(y - V(y_exact)[row * N + k]) <= V(y_bound)[row * N + k])) FAIL("y_exact");
    }
    return puts("equal"), 0;
}
"""


def program(made: Vectors) -> str:
    """The program for these vectors: operands and layouts filled in."""
    m, n, k = made.shape
    parts, checks = [], []
    operands: list[tuple[str, int, Scheme | None]] = [
        ("x", m, made.linear.input),
        ("w", n, made.linear.weight),
    ]
    for name, rows, scheme in operands:
        if scheme is None:
            continue
        high, wide = scheme.inner.tile[0] or rows, scheme.inner.tile[1] or k
        columns, element = -(-k // wide), scheme.element
        outer = f"* V({name}_outer)[0]" if len(scheme.scales) == 2 else ""
        parts.append(
            f"OPERAND({name}, {rows}, {high}, {wide}, {columns}, {element.name}, {element.bits}, "
            f"{scheme.inner.format.name}, {outer})\n#define {name.upper()}_ELEMENT {element.name}"
        )
        checks.append(f"{name}_check()")
        for layout, offset in (("sf_128x4", "SF_128X4"), ("deepgemm_ue8m0", "UE8M0")):
            array, check = f"{name}_scales_{layout}", f"{name}_{layout}_check"
            if array in made.arrays:
                parts.append(f"SWIZZLED({name}, {array}, {check}, {rows}, {high}, {columns}, {offset})")
                checks.append(f"{check}()")
    if made.linear.accumulate == "int32":
        widths = [s.group or k for s in (made.linear.input, made.linear.weight) if s]
        parts.append(f"#define INT32 {min(widths)}")
    parts.append(f"#define X {'x' if made.linear.input is None else 'x_decoded'}")
    return PROGRAM.replace("OPERANDS", "\n".join(parts)).replace("CHECKS", " || ".join(checks))


def compiled(source: str, made: Vectors, folder: Path) -> Path:
    write(made, folder)
    (folder / "check.c").write_text(source)
    macros = [f"-DSTEM={made.stem}", f'-DHEADER="{made.stem}.h"']
    command = [GCC or "gcc", *FLAGS, *macros, "check.c", "-o", "check", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:2000]
    return folder / "check"


COMPUTED = [
    ("nvfp4", None, (3, 130, 200)),
    ("mxfp4", None, (130, 5, 200)),
    ("mxfp8", None, (5, 33, 96)),
    ("mxfp4a16", None, (3, 5, 96)),
    ("mxfp6a8", None, (3, 5, 70)),
    ("fp8_dynamic", None, (5, 6, 77)),
    ("fp8_per_tensor", None, (5, 6, 77)),
    ("fp8_block", None, (5, 130, 300)),
    ("fp8_block128_ue8m0", "fp8_group128_ue8m0", (5, 130, 700)),
    ("int8", None, (5, 6, 77)),
    ("w4a8", None, (5, 6, 300)),
    ("w4a16", None, (5, 6, 300)),
    ("w8a16", None, (5, 6, 300)),
]


@pytest.mark.skipif(GCC is None, reason="gcc is not installed, and nothing else here reads the header")
@pytest.mark.parametrize(("name", "inputs", "shape"), COMPUTED, ids=lambda value: str(value))
def test_a_c_program_derives_the_same(
    name: str, inputs: str | None, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    made = vectors(name, shape, 0, inputs)
    check = compiled(program(made), made, tmp_path)
    done = subprocess.run([check], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "equal\n")


@pytest.mark.skipif(GCC is None, reason="gcc is not installed, and nothing else here reads the header")
def test_the_c_program_sees_a_wrong_bit(tmp_path: Path) -> None:
    made = vectors("nvfp4", (2, 3, 32))
    check = program(made)
    compiled(check, made, tmp_path)
    head = tmp_path / f"{made.stem}.h"
    right = head.read_text()
    place = right.index("0x", right.index("w_scales_sf_128x4[")) + 2
    head.write_text(right[:place] + ("00" if right[place : place + 2] != "00" else "01") + right[place + 2 :])
    macros = [f"-DSTEM={made.stem}", f'-DHEADER="{head.name}"']
    subprocess.run([GCC or "gcc", *FLAGS, *macros, "check.c", "-o", "check", "-lm"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "check"], capture_output=True).returncode == 1


EVERY = [*schemes, *(name for name in presets if name not in schemes)]


@pytest.mark.skipif(GCC is None, reason="gcc is not installed, and nothing else here reads the header")
def test_every_header_compiles_beside_every_other(tmp_path: Path) -> None:
    """One translation unit with all of them: no name is taken twice."""
    stems = [made.stem for name in EVERY if write(made := vectors(name, (2, 3, 35)), tmp_path)]
    assert len(set(stems)) == len(EVERY)
    (tmp_path / "all.c").write_text(
        "".join(f'#include "{stem}.h"\n' for stem in stems) + "int main(void) { return 0; }\n"
    )
    command = [GCC or "gcc", *FLAGS, "-pedantic", "-fsyntax-only", "all.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.parametrize("name", EVERY)
def test_arrays_belong_together(name: str) -> None:
    m, n, k = 3, 131, 70
    made = vectors(name, (m, n, k))
    arrays = {key: array.data for key, array in made.arrays.items()}
    for operand, rows, scheme in (("x", m, made.linear.input), ("w", n, made.linear.weight)):
        values = arrays[operand]
        assert not (values.view(np.uint32) & 0xFFFF).any(), "exact in bf16"
        if scheme is None:
            continue
        codes = unpack(arrays[f"{operand}_packed"], packing(scheme.element.bits), k)
        assert np.array_equal(codes, arrays[f"{operand}_codes"])
        linear = by_row(arrays[f"{operand}_scales"], scheme.inner.tile, rows)
        for key in arrays:
            layout = key.removeprefix(f"{operand}_scales_")
            if layout in layouts:
                assert np.array_equal(layouts[layout].unswizzle(arrays[key], linear.shape), linear)
        if arrays[f"{operand}_scales"].size > 1:
            assert len(np.unique(arrays[f"{operand}_scales"])) > 1, "a scale in the wrong place must show"
            assert not values[-1, -1:].any(), "the last tile is zero"
    if made.linear.accumulate == "fp32":
        x = arrays.get("x_decoded", arrays["x"])
        assert np.array_equal(arrays["y"], gemm(x, arrays["w_decoded"]))
    assert 0 <= made.worst <= 1
    assert np.isfinite(arrays["y"]).all()


def test_same_arguments_same_bytes_and_no_time() -> None:
    first, second = vectors("nvfp4", (4, 8, 64), 7), vectors("nvfp4", (4, 8, 64), 7)
    assert npz(first) == npz(second)
    assert header(first) == header(second)
    other = vectors("nvfp4", (4, 8, 64), 8)
    assert other.stem != first.stem
    assert not np.array_equal(other.arrays["x"].data, first.arrays["x"].data)
    members = zipfile.ZipFile(io.BytesIO(npz(first))).infolist()
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}
    loaded = np.load(io.BytesIO(npz(first)))
    assert list(loaded) == list(first.arrays)
    assert all(np.array_equal(loaded[name], array.data) for name, array in first.arrays.items())


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("nvfp4", "e436a1ba8371bb89"),
        ("int8", "c373739048519abc"),
        ("w4a16_asym", "d62bb8a0e0cf4503"),
    ],
)
def test_bits_stay(name: str, digest: str) -> None:
    """Bits are API: a change here is a change for everybody who checks kernels against these vectors."""
    made = vectors(name, (4, 8, 64))
    content = b"".join(key.encode() + array.data.tobytes() for key, array in made.arrays.items())
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_presets_and_schemes_by_name() -> None:
    assert settle("fp8_dynamic", None) == ("fp8_dynamic", presets["fp8_dynamic"].linear)
    assert settle("nvfp4", None)[1].input is schemes["nvfp4"], "a preset too, which brings the input"
    assert settle("nvfp4", "mxfp8")[1].input is schemes["mxfp8"]
    assert settle("fp8_block128", None)[1].input is None
    assert settle("int8_channel", "int8_token")[1].accumulate == presets["int8"].linear.accumulate == "int32"
    assert settle("uint4_g128", "int8_token")[1].accumulate == "fp32"
    assert settle("fp8_channel", "fp8_token")[1].accumulate == "fp32"


def test_what_cannot_be_made_is_refused() -> None:
    for name, inputs, message in (
        ("fp9", None, "no scheme and no preset"),
        ("fp8_dynamic", "fp8_token", "the preset brings"),
        ("fp8_channel", "fp9", "unknown scheme"),
        ("fp8_dynamic+kv8", None, "no KV cache"),
    ):
        with pytest.raises(UsageError, match=message):
            vectors(name, (2, 2, 32), 0, inputs)
    with pytest.raises(UsageError, match="not the shape of a product"):
        vectors("nvfp4", (2, 32))
    with pytest.raises(UsageError, match="too many elements"):
        vectors("nvfp4", (1, LARGEST, 1))
    with pytest.raises(UsageError, match="too many products"):
        vectors("nvfp4", (512, 512, 512))


def test_files_that_are_there(tmp_path: Path) -> None:
    made = vectors("fp8_channel", (2, 3, 16))
    files = write(made, tmp_path / "new" / "place")
    assert [file.path.suffix for file in files] == [".npz", ".h"]
    for file in files:
        content = file.path.read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
    before = [file.path.stat().st_mtime_ns for file in files]
    assert write(made, tmp_path / "new" / "place") == files
    assert [file.path.stat().st_mtime_ns for file in files] == before
    files[1].path.write_text("mine")
    files[0].path.unlink()
    with pytest.raises(UsageError, match="another file is there"):
        write(made, tmp_path / "new" / "place")
    assert not files[0].path.exists()
    assert files[1].path.read_text() == "mine"
    with pytest.raises(StorageError):
        write(made, files[1].path)
