"""One line on stderr for long work: how much is done, how fast, and how long it will take.

    quantizing   41 %   1.1 of 2.7 GB   1.9 GB/s   0.84 s left
    running      62 %   1860 of 3000 steps   41 steps/s   28 s left

What is counted is bytes, or what has a name: steps, tokens. The line is redrawn in place ten times a second at most,
and vanishes when the work is done. Without a terminal on the other end, or with ``quiet``, nothing is written.
``advance`` may be called from several threads.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic
from typing import TextIO

from narrowcast.report.tables import middle, quantity, rate, seconds, size, terminal_width

REDRAW = 0.1  # seconds


class Progress:
    """Counts towards ``total`` and draws it: bytes, or what ``unit`` names, in the plural."""

    def __init__(
        self,
        total: int,
        label: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        unit: str | None = None,
    ) -> None:
        self.total, self.label, self.unit, self.done_bytes = total, label, unit, 0
        self.seconds = 0.0  # that the work took, once it is done
        self._stream = stream or sys.stderr
        self._shown = not quiet and self._stream.isatty()
        self._start = self._drawn = monotonic()
        self._lock = threading.Lock()

    def advance(self, n: int) -> None:
        """``n`` more are done."""
        with self._lock:
            self.done_bytes += n
            now = monotonic()
            if self._shown and now - self._drawn >= REDRAW:
                self._drawn = now
                self._write(middle(self.line(now), terminal_width() - 1))

    def line(self, now: float) -> str:
        """The text at time ``now`` (of time.monotonic); the time left assumes the mean rate so far."""
        elapsed = max(now - self._start, 1e-9)
        share = self.done_bytes / self.total if self.total else 1.0
        parts = [f"{self.label} {100 * share:4.0f} %", self._counted()]
        if self.done_bytes:
            speed = self.done_bytes / elapsed
            parts.append(rate(speed) if self.unit is None else f"{speed:.3g} {self.unit}/s")
            parts.append(f"{seconds(elapsed * max(self.total - self.done_bytes, 0) / self.done_bytes)} left")
        return "   ".join(parts)

    def _counted(self) -> str:
        if self.unit is None:
            return f"{size(self.done_bytes)} of {size(self.total)}"
        return f"{quantity(self.done_bytes)} of {quantity(self.total)} {self.unit}"

    def done(self) -> None:
        """Take the line away."""
        with self._lock:
            self.seconds = monotonic() - self._start
            if self._shown:
                self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[2K{text}")
        self._stream.flush()
