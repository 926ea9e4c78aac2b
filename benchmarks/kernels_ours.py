"""narrowcast's kernels on the same weight, as a worker of kernels.py: python kernels_ours.py WEIGHT ROWS
COLUMNS THREADS.

Each thread takes one run of rows and the results are kept until the call ends, as the peers keep theirs. (The
quantize job works on chunks of 1 MiB whose results are written and dropped; a thousand small results that are kept
would measure page faults, where the large arrays of all contestants come in huge pages.)
NVFP4 makes two passes, since its outer scale needs the amax of the whole tensor. memcpy is numpy's copy of
the same weight by the same threads, for scale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from serve import serve

from narrowcast.containers.compressed_tensors import spelling
from narrowcast.kernels import Rows, choose
from narrowcast.numbers.formats import formats
from narrowcast.tensors.presets import presets
from narrowcast.tensors.scaling import outer_scale

PRESETS = {
    "fp8_channel": "fp8_dynamic",
    "int8_channel": "int8",
    "int4_g128": "w4a16",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4a16",
    "mxfp4": "mxfp4a16",
}
BF16 = formats["bf16"]


class Weight:
    """A bf16 weight and the threads that work on it."""

    def __init__(self, bits: np.ndarray, pool: ThreadPoolExecutor, threads: int) -> None:
        self.bits, self.pool, self.threads = bits, pool, threads

    def parts(self, multiple: int) -> list[np.ndarray]:
        """One run of rows for each thread, beginning on multiples of ``multiple``."""
        rows = len(self.bits)
        height = -(-rows // self.threads // multiple) * multiple
        return [self.bits[a : a + height] for a in range(0, rows, height)]

    def quantize(self, preset: str) -> list[Rows]:
        """All chunks, packed, with the outer scale where the scheme has one."""
        how = spelling(presets[preset].linear, BF16)
        backend = choose(how.scheme, BF16, how.packing).backend
        parts = self.parts(how.row_multiple)
        outer = None
        if len(how.scheme.scales) == 2:
            amax = max(s.amax for s in self.pool.map(lambda x: backend.scan(x, BF16), parts))
            outer = float(outer_scale(np.full((1, 1), amax, np.float32), how.scheme, BF16).item())
        work = self.pool.map(lambda x: backend.quantize(x, BF16, how.scheme, how.packing, outer), parts)
        return list(work)

    def decode(self, rows: list[Rows], preset: str) -> list[np.ndarray]:
        """Quantized chunks back to bf16."""
        how = spelling(presets[preset].linear, BF16)
        backend = choose(how.scheme, BF16, how.packing).backend
        k = self.bits.shape[1]
        return list(
            self.pool.map(lambda r: backend.dequantize(r, how.scheme, how.packing, k, BF16, None), rows)
        )

    def copy(self, target: np.ndarray) -> None:
        """memcpy by all threads, one run of rows each."""
        pairs = zip(
            np.array_split(target, self.threads), np.array_split(self.bits, self.threads), strict=True
        )
        list(self.pool.map(lambda pair: np.copyto(*pair), pairs))


def main() -> None:
    """Load the weight and serve."""
    path, rows, columns, threads = sys.argv[1], *map(int, sys.argv[2:])
    bits = np.fromfile(path, np.uint16).reshape(rows, columns)
    with ThreadPoolExecutor(threads) as pool:
        weight = Weight(bits, pool, threads)
        target = np.empty_like(bits)
        calls: dict[str, dict[str, Callable[[], Any]]] = {
            row: {"narrowcast": lambda preset=preset: weight.quantize(preset)}
            for row, preset in PRESETS.items()
        }
        coded = weight.quantize("fp8_dynamic")
        calls["fp8_decode"] = {"narrowcast": lambda: weight.decode(coded, "fp8_dynamic")}
        calls["memcpy"] = {"numpy": lambda: weight.copy(target)}
        serve(calls)


if __name__ == "__main__":
    main()
