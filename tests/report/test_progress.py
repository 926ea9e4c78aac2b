"""The progress line: seen on a terminal only, gone when done, counted from many threads."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pytest

from narrowcast.report import progress
from narrowcast.report.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_rate_and_time_left(clock: list[float]) -> None:
    bar = Progress(2_000_000_000, "quantizing", stream=Terminal())
    clock[0] += 0.5
    bar.advance(500_000_000)
    assert bar.line(clock[0]) == "quantizing   25 %   500 MB of 2.00 GB   1.00 GB/s   1.50 s left"


def test_drawn_at_most_ten_times_a_second_and_taken_away(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    bar = Progress(1000, "checking", stream=screen)
    for _ in range(100):
        clock[0] += 0.011
        bar.advance(10)
    bar.done()
    drawn = screen.getvalue().split("\r\x1b[2K")[1:]
    assert len(drawn) == 11  # ten times in 1.1 s, and the wiping
    assert drawn[-1] == ""
    assert all("\n" not in line and len(line) < 80 for line in drawn)


@pytest.mark.parametrize("quiet", [True, False])
def test_silent_without_a_terminal_or_when_asked(clock: list[float], quiet: bool) -> None:
    screen = Terminal() if quiet else io.StringIO()
    bar = Progress(10, "x", quiet=quiet, stream=screen)
    clock[0] += 1
    bar.advance(10)
    bar.done()
    assert screen.getvalue() == ""


def test_steps_by_name(clock: list[float]) -> None:
    bar = Progress(3000, "running", stream=Terminal(), unit="steps")
    clock[0] += 10
    bar.advance(600)
    assert bar.line(clock[0]) == "running   20 %   600 of 3000 steps   60 steps/s   40.0 s left"


def test_nothing_to_do_is_done(clock: list[float]) -> None:
    assert Progress(0, "x", stream=Terminal()).line(101.0) == "x  100 %   0 B of 0 B"


def test_counts_from_many_threads() -> None:
    bar = Progress(80_000, "x", quiet=True)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [bar.advance(1) for _ in range(10_000)])
    assert bar.done_bytes == 80_000
