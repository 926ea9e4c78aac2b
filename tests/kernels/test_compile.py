"""Where compiled kernels are kept, and what is said about it; every case in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import narrowcast

SCAN = """
import sys
import numpy as np
from narrowcast.kernels.cpu import CPU
assert "numba" not in sys.modules
from narrowcast.numbers.formats import BF16
assert CPU.scan(np.array([[0x3F80, 0xC040]], np.uint16), BF16).amax == 3.0
print("numba" in sys.modules)
"""


def scan(package: Path | None = None, **environment: str) -> tuple[bool, str]:
    """Run the smallest kernel; whether numba was imported for it, and what was said."""
    variables = {
        k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    } | environment
    if package is not None:
        variables["PYTHONPATH"] = str(package)
    done = subprocess.run(
        [sys.executable, "-c", SCAN], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == "True", done.stderr


def test_compiled_once_then_loaded_without_numba_and_never_from_a_damaged_file(tmp_path: Path) -> None:
    compiled, said = scan(NUMBA_CACHE_DIR=str(tmp_path))
    assert compiled
    assert said == f"compiling kernel peak_uint16, once; cached in {tmp_path / 'narrowcast'}\n"
    assert scan(NUMBA_CACHE_DIR=str(tmp_path)) == (False, "")
    (kept,) = (tmp_path / "narrowcast").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1000])
    compiled, said = scan(NUMBA_CACHE_DIR=str(tmp_path))
    assert compiled
    assert "compiling" in said
    assert scan(NUMBA_CACHE_DIR=str(tmp_path)) == (False, "")


def test_a_read_only_install_uses_the_users_folder_and_a_changed_source_compiles_anew(tmp_path: Path) -> None:
    package = tmp_path / "site"
    shutil.copytree(
        Path(narrowcast.__file__).parent, package / "narrowcast", ignore=shutil.ignore_patterns("__pycache__")
    )
    folder = package / "narrowcast" / "kernels" / "cpu"
    (folder / "__pycache__").write_text("a file where the folder would be")
    home = {"XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    compiled, said = scan(package, **home)
    assert compiled
    assert f"cached in {tmp_path / 'home' / 'narrowcast'}\n" in said
    assert scan(package, **home) == (False, "")
    with (folder / "codes.py").open("a") as source:
        source.write("# changed\n")
    assert scan(package, **home)[0]


def test_without_any_folder_it_says_so_and_works() -> None:
    compiled, said = scan(NUMBA_CACHE_DIR="/dev/null")
    assert compiled
    assert said == "compiling kernel peak_uint16, for this run only: no cache folder is writable\n"
