"""Compiled kernels by name and carrier: compiled by numba on first use, kept on disk as native code.

A stored kernel is loaded by llvmlite alone, so a run with a warm cache never pays for importing numba. Its key is
everything its bits depend on: the sources of this package and of the formats, llvmlite's version, and the
processor's name and features. It is stored beside this package, or where that is read-only in the user's cache
folder; NUMBA_CACHE_DIR overrules both. A kernel that cannot be stored is compiled again next time, and says so.

Left out: numba's own ``cache=True``. It needs numba's import (0.4 s), and its key does not see changes in the
functions that a kernel inlines.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from narrowcast.kernels.cpu.matvec_look import Look
from narrowcast.kernels.cpu.parameters import FLOAT_ELEMENT
from narrowcast.numbers import formats

Kernel = Callable[..., int]
_HERE = Path(__file__).parent
_lock = threading.Lock()

# Arguments by letter: i int64, f float32, and pointers: S the carrier, B uint8, W uint32, N int64, F float32,
# D float64.
_SIGNATURES = {
    "peak": "S i S",
    "quantize": "S i i i i i W W f i i i B i W B S S F F F F F S B",
    "check": "S i i B i i i i W F i f i i W B N D F F F W D D F B B",
    "dequantize": "B i i i i i i W i f i i W B S F F F S B",
    "pair": "S i i B i i i i i W F i f i i W B i D i D W W N N F F F W D W W F B B",
    "survey": "B i i i i i i i N B B",
    "pairs": "B B i N",
    "matvec": "S i i B i i i i i i i B B F F F F F i B F S",
}
_ONE_FOR_ALL, _BY_WIDTH = ("peak", "pairs"), ("survey",)  # kernels that no kind of element changes


def kernel(name: str, carrier: str, kind: int = 0, bits: int = 8, look: Look | None = None) -> Kernel:
    """The compiled function ``name`` for elements of this carrier ("uint16", "uint32", or what to dequantize to,
    "uint16" for bf16 or "float32", "uint8" for bytes that are only counted) and codes of this kind, packed ``bits``
    each, or with the ``look`` of a product.

    Arguments are integers, floats and array addresses; the call releases the interpreter lock.
    """
    with _lock:
        return _kernel(name, carrier, kind, bits, look)


@cache
def _kernel(name: str, carrier: str, kind: int, bits: int, look: Look | None) -> Kernel:
    symbol = f"{name}_{carrier}"
    if look is not None:
        symbol += f"_{look}"
    elif name not in _ONE_FOR_ALL:
        element = "float" if kind == FLOAT_ELEMENT else "integer"
        symbol += f"_{bits}" if name in _BY_WIDTH else f"_{element}{bits}"
    code = _stored(symbol)
    if code is None:
        folder = _folder()
        where = f"once; cached in {folder}" if folder else "for this run only: no cache folder is writable"
        print(f"compiling kernel {symbol}, {where}", file=sys.stderr, flush=True)
        code = _compile(name, carrier, kind, bits, look, symbol)
        if folder:
            _store(folder / _file_name(symbol), code)
    return _load(code, symbol, name)


def _compile(name: str, carrier: str, kind: int, bits: int, look: Look | None, symbol: str) -> bytes:
    """Native code of one kernel, exported under ``symbol``."""
    from numba import njit, types

    from narrowcast.kernels.cpu import check, counting, decode, matvec_loops, measuring, quantize
    from narrowcast.kernels.cpu.units import Codes

    makers: dict[str, Callable[[Codes], Any]] = {
        "peak": quantize.peak_kernel,
        "quantize": quantize.quantize_kernel,
        "check": check.check_kernel,
        "dequantize": decode.dequantize_kernel,
        "pair": measuring.pair_kernel,
        "survey": counting.survey_kernel,
        "pairs": counting.pairs_kernel,
    }
    function = makers[name](Codes(kind, bits)) if look is None else matvec_loops.matvec_kernel(look)
    letters = {
        "i": types.int64, "f": types.float32, "S": types.CPointer(getattr(types, carrier)),
        "B": types.CPointer(types.uint8), "W": types.CPointer(types.uint32),
        "N": types.CPointer(types.int64), "F": types.CPointer(types.float32), "D": types.CPointer(types.float64),
    }  # fmt: skip
    arguments = tuple(letters[letter] for letter in _SIGNATURES[name].split())
    options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled = njit(types.void(*arguments), **options)(function)
    mangled = compiled.overloads[arguments].fndesc.mangled_name
    text = compiled.inspect_llvm(arguments).replace(mangled, symbol)
    module = llvm.parse_assembly(text)
    module.verify()
    return _target().emit_object(module)  # type: ignore[no-any-return]


def _load(code: bytes, symbol: str, name: str) -> Kernel:
    """Link native code into the process. numba's calling convention has two leading pointers that it never uses
    here: the return value's place and the exception's."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    kinds = {"i": ctypes.c_int64, "f": ctypes.c_float}
    arguments = [kinds.get(letter, ctypes.c_void_p) for letter in _SIGNATURES[name].split()]
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    function = prototype(engine.get_function_address(symbol))
    unused = ctypes.create_string_buffer(16)

    def call(*values: Any) -> int:
        return function(unused, unused, *values)

    call.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return call


@cache
def _target() -> Any:
    """The machine that runs this process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, codemodel="jitdefault", jit=True
    )


def _features() -> str:
    return llvm.get_host_cpu_features().flatten()  # type: ignore[no-any-return]


@cache
def _key() -> str:
    """What the bits of every kernel depend on."""
    digest = hashlib.sha256()
    for part in (llvmlite.__version__, llvm.get_host_cpu_name(), _features()):
        digest.update(part.encode() + b"\0")
    for source in (*sorted(_HERE.glob("*.py")), Path(formats.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _file_name(symbol: str) -> str:
    return f"{symbol}-{_key()}.o"


def _candidates() -> list[Path]:
    """Folders that may hold kernels, in order of preference."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen) / "narrowcast"]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [_HERE / "__pycache__", user / "narrowcast"]


@cache
def _folder() -> Path | None:
    """The first candidate that can be written to."""
    for folder in _candidates():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def _stored(symbol: str) -> bytes | None:
    """A stored kernel whose checksum holds, or None."""
    for folder in _candidates():
        try:
            stored = (folder / _file_name(symbol)).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    return None


def _store(path: Path, code: bytes) -> None:
    """Write in one step, so that no other process reads half a kernel; a full disk only costs the next run."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.chmod(temporary, 0o644)  # a shared install serves every user
        os.replace(temporary, path)
    except OSError as error:
        print(f"kernel not cached in {path.parent}: {error}", file=sys.stderr)
