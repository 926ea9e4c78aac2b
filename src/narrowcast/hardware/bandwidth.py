"""The memory bandwidth of the machine's processor, measured.

    read  =  bytes read / s              the maximum over an array
    copy  =  (bytes read + written) / s  one array into another

Arrays are several times the last cache, so that a pass finds nothing of the one before; each thread has its own part,
and a pass ends when the last thread has. The fastest pass counts, because a floor is made of it: other work can only
make passes slower. The median pass is told beside it. What a processor reads of a line before it overwrites it
(write-allocate) is not counted: copies of this size go around the caches where the C library can. The better of both
kinds is the bandwidth: a step that streams weights mostly reads, but numpy does not read as fast as every machine can.

Source of the method: McCalpin, "Memory Bandwidth and Machine Balance" (1995), whose rules on sizes are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from narrowcast.hardware.host import free_memory

CACHES = 4  # arrays together, in last caches
SMALLEST, LARGEST = 256 << 20, 2 << 30
MEMORY_SHARE = 4  # at most a quarter of what is free


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second of reading and of copying in the fastest of ``passes``, with how many threads, over how many
    bytes; ``usual`` is the median pass of the better kind."""

    read: float
    copy: float
    usual: float
    threads: int
    footprint: int
    passes: int

    @property
    def best(self) -> float:
        """Bytes a second that count."""
        return max(self.read, self.copy)


def measure(seconds: float = 1.0, threads: int | None = None, footprint: int | None = None) -> Bandwidth:
    """Measure for about ``seconds``, after the arrays are filled. ``threads`` is by default what the process may use,
    ``footprint`` the bytes of both arrays together, by default several last caches, and never more than a share of what
    memory is free."""
    threads = threads or len(os.sched_getaffinity(0))
    free = free_memory()
    footprint = footprint or footprint_of(last_cache(), free)
    footprint = footprint if free is None else min(footprint, free // MEMORY_SHARE)
    words = footprint // 2 // 4 // threads
    sources = [np.ones(words, np.float32) for _ in range(threads)]
    targets = [np.zeros(words, np.float32) for _ in range(threads)]
    moved = words * 4 * threads
    with ThreadPoolExecutor(threads) as pool:
        for target in targets:
            target.fill(0)  # pages of zeros are one page until they are written
        reads = _passes(lambda: list(pool.map(np.maximum.reduce, sources)), seconds / 2)
        copies = _passes(lambda: list(pool.map(np.copyto, targets, sources)), seconds / 2)
    read, copy = moved / min(reads), 2 * moved / min(copies)
    usual = moved / median(reads) if read >= copy else 2 * moved / median(copies)
    return Bandwidth(read, copy, usual, threads, 2 * moved, min(len(reads), len(copies)))


def _passes(work: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each pass, three at least, the first of which is thrown away."""
    work()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def footprint_of(cache: int, free: int | None) -> int:
    """Bytes of all arrays: several caches, between a quarter of a GiB and two, and not of memory that others need."""
    wanted = min(max(CACHES * cache, SMALLEST), LARGEST)
    return wanted if free is None else min(wanted, free // MEMORY_SHARE)


def last_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that Linux tells of; 0 where it tells nothing."""
    sizes = [_size(file.read_text()) for file in folder.glob("index*/size")]
    return max(sizes, default=0)


def _size(text: str) -> int:
    number, unit = text.strip()[:-1], text.strip()[-1:]
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit)
    return int(number) * scale if scale and number.isdecimal() else 0
