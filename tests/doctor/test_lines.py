"""Lines out of whatever wraps them: colours, times, processes, collectors, encodings."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowcast.doctor import diagnose, read
from narrowcast.doctor.lines import LONGEST, cleaned, message
from narrowcast.doctor.reading import COMPLAINTS, FACTS

SAID = "Casting torch.bfloat16 to torch.float16."
PREFIXES = (
    "",
    "WARNING 11-30 01:02:03 [model.py:2498] ",
    "WARNING 11-30 01:02:03 model.py:2498] ",
    "WARNING 11-30 01:02:03.456 model.py:2498] ",
    "WARNING 11-30 01:02:03 [v1/.../model.py:2498] ",
    "(EngineCore pid=9) WARNING 11-30 01:02:03 [model.py:2498] ",
    "(EngineCore_DP0 pid=9) WARNING 11-30 01:02:03 [model.py:2498] ",
    "(Worker_TP0 pid=9) WARNING 11-30 01:02:03 [model.py:2498] ",
    "(VllmWorkerProcess pid=9) WARNING 08-16 18:11:53 [model.py:2498] ",
    "(RayWorkerWrapper pid=9, ip=192.0.2.7) WARNING 08-16 18:11:53 [model.py:2498] ",
    "\x1b[0;36m(EngineCore pid=9)\x1b[0;0m \x1b[33mWARNING\x1b[0m 11-30 01:02:03 [model.py:2498] ",
    "vllm-1  | WARNING 11-30 01:02:03 [model.py:2498] ",
    "2026-11-30T01:02:03.123456789Z stderr F WARNING 11-30 01:02:03 [model.py:2498] ",
    "2026-11-30T01:02:03Z (Worker pid=1) WARNING 11-30 01:02:03 [model.py:2498] ",
    "Nov 30 01:02:03 host vllm[812]: WARNING 11-30 01:02:03 [model.py:2498] ",
    "[2026-11-30 01:02:03] ",
    "[2026-11-30 01:02:03 TP0] ",
    "[2026-11-30 01:02:03 DP1 TP1 EP1] ",
    "[2026-11-30 01:02:03] WARNING model_config.py:608: ",
    "[gpu_id=0] ",
    "WARNING:sglang.srt.configs.model_config:",
    "[11/30/2026-01:02:03] [TRT-LLM] [W] ",
    "[11/30/2026-01:02:03] [TRT-LLM] [W] [_torch  ] ",
    "[11/30/2026-01:02:03] [TRT-LLM] [W] [_torch][RANK 3] ",
    "[1,0]<stdout>:[11/30/2026-01:02:03] [TRT-LLM] [W] ",
    "[TensorRT-LLM][WARNING] ",
    "2026-11-30 01:02:03,456 [WARNING] [TRT-LLM] [W] ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_prefixes_come_off(prefix: str, end: str) -> None:
    assert message(cleaned(prefix + SAID + end)) == SAID


@pytest.mark.parametrize("prefix", [prefix for prefix in PREFIXES if "T-LLM]" not in prefix])
def test_a_finding_shows_the_bare_line(prefix: str) -> None:
    (found,) = diagnose([prefix + SAID]).findings
    assert (found.name, found.line) == ("cast-to-fp16", SAID)


def test_collectors_of_json() -> None:
    for key in ("log", "message", "msg"):
        assert cleaned(f'{{"level": "WARNING", "{key}": "\\u001b[33m{SAID}\\u001b[0m\\n"}}') == SAID
    assert cleaned('{"broken": ') == '{"broken": '
    assert cleaned('{"count": 1, "log": 5}') == '{"count": 1, "log": 5}'


def test_progress_bars_that_overwrite_themselves_hide_nothing() -> None:
    (found,) = diagnose(
        [f"Loading:  50%\rLoading: 100%\r(Worker pid=1) WARNING 11-30 01:02:03 [a.py:1] {SAID}"]
    ).findings
    assert found.name == "cast-to-fp16"


def test_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = f"WARNING 11-30 01:02:03 [model.py:2498] {SAID}"
    path.write_bytes(
        b"\xff\xfe\x80 not text\n\x00\x01\x02\n" + line.encode() + b"\r\n" + line.encode("utf-16-le") + b"\n"
    )
    (found,) = diagnose(read(path)).findings
    assert found.count == 2


def test_standard_input() -> None:
    lines = iter([f"WARNING 11-30 01:02:03 [model.py:2498] {SAID}\n".encode()])
    (found,) = diagnose(read(None, lines)).findings
    assert found.first == 1


def test_a_line_of_megabytes_is_cut() -> None:
    assert len(cleaned("x" * 5_000_000)) == 1 << 14


def test_control_characters_of_a_log_do_not_reach_the_texts() -> None:
    line = "Layer 'a\x1b]0;title\x07b' is not supported by AutoAWQMarlin. Falling back to unoptimized AWQ kernels."
    (found,) = diagnose([line]).findings
    assert "Layer ab and" in found.said


def test_memory_does_not_grow_with_the_log() -> None:
    def long_log(count: int) -> Iterator[str]:
        yield f"WARNING 11-30 01:02:03 [model.py:2498] {SAID}"
        for i in range(count):
            yield f"INFO 11-30 01:02:03 [loggers.py:259] Engine 000: Avg prompt throughput: {i}.0 tokens/s"
            yield f"Attempted to load weight layers.{i}.a with dtype torch.int8 into parameter with dtype torch.half"

    def peak(count: int) -> int:
        tracemalloc.start()
        diagnose(long_log(count))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(10)  # compiles the rows
    # Ten times the lines may cost nothing but noise of the allocator, far below a line's 90 bytes.
    assert peak(4_000) - peak(400) < 3_600 * 9


@pytest.mark.parametrize("filler", ["a", "a.", "model='", "Error.", "- ", "[ ", "Using ", "(a pid=1) "])
def test_no_line_takes_long(filler: str) -> None:
    """A row with quadratic time takes seconds for one of these lines, all rows together milliseconds."""
    words = " ".join(sorted({word for row in (*FACTS, *COMPLAINTS) for word in row.words}))
    long = filler * (LONGEST // len(filler))
    start = time.process_time()
    diagnose(["[TensorRT-LLM][INFO]", f"{words} {long}", f"{long[: -len(words) - 1]} {words}"])
    assert time.process_time() - start < 1
