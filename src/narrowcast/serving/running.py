"""An engine as a child: its log passed on and read as it is printed, its end told, nothing left behind: ``run``.

    engine ──stdout──▶ ours, unchanged ──▶ doctor's rows ──▶ what is really running, once it serves
           ──stderr──▶ ours, unchanged ──▶

The engine gets a session of its own, so that a Ctrl-C reaches it once, from here, and it can end its workers itself.
It is told to end by the signal that we got; a second one, or half a minute, tells the whole session, and the next kills
it. On Linux the kernel ends it should we be killed ourselves. Workers that outlive it are killed.

Left out: starting it again when it dies, which is a supervisor's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from narrowcast.doctor import Reader, Report
from narrowcast.doctor.lines import LONGEST, decoded
from narrowcast.errors import InputError, UsageError
from narrowcast.serving.command import Command

PATIENCE = (30.0, 10.0)  # seconds from one way of ending it to the next
_SETTLE = 0.5  # seconds for what the other stream still holds of the start
_POLL = 0.05
_CHUNK = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """How it ended: the engine's exit code (negative: the signal that it died of), the signal that we passed on, and
    what its log says. ``served`` is whether it was ready before that."""

    code: int
    signal: int | None
    served: bool
    report: Report | None

    @property
    def exit_code(self) -> int:
        """0 for a server that was stopped or ended well, 1 for one that failed, 128 + signal for a start that was
        interrupted."""
        if self.signal is not None:
            return 0 if self.served else 128 + self.signal
        return int(self.code != 0 or not self.served)


def found(
    command: Command, *, python: str | None = None, executable: str | None = None
) -> tuple[str, ...] | None:
    """The words that start the engine here, or None where it is not installed.

    ``executable`` is the engine's command, ``python`` an interpreter that has it; without either the command on PATH
    is taken, then this interpreter. UsageError for one that is not there.
    """
    for given in (python, executable):
        if given is not None and shutil.which(given) is None:
            raise UsageError("there is no such program", got=given, wanted="an executable file")
    if python is not None:
        return command.in_python(python)
    if executable is not None:
        return (executable, *command.program[1:], command.model, *command.options)
    if shutil.which(command.program[0]) is not None:
        return command.argv
    return command.in_python(sys.executable) if _importable(command.module) else None


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module.partition(".")[0]) is not None


def write_files(command: Command) -> None:
    """The files that the command names, in the current directory. UsageError where another of that name is."""
    for name, text in command.files.items():
        path = Path(name)
        if path.exists() and path.read_text(errors="replace") != text:
            raise UsageError(
                "a file of that name is there, and is another", where=path, remedy="move it away"
            )
        path.write_text(text)


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    ready: Callable[[Report], None],
    out: BinaryIO | None,
    err: BinaryIO | None,
) -> Ended:
    """Run the engine until it ends. ``ready`` is called once, when it serves; its streams go to ``out`` and ``err``
    (None: nowhere). Signals are passed on to it while it runs. InputError where it cannot be started."""
    asked: list[int] = []
    with _kept(asked):
        child = _Child(argv, environment, asked)
        try:
            return child.watch(ready, out, err)
        finally:
            child.end()


@contextlib.contextmanager
def _kept(asked: list[int]) -> Iterator[None]:
    """Keep what is sent to us for the child, in ``asked``; what is ignored stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda got, frame: asked.append(got))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Log:
    """Both streams in the order in which they came."""

    reader: Reader = field(default_factory=Reader)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pump(self, stream: BinaryIO, to: BinaryIO | None) -> None:
        """Pass bytes on as they come, and lines to the reader."""
        rest = b""
        while chunk := os.read(stream.fileno(), _CHUNK):
            with self.lock:
                if to is not None:
                    with contextlib.suppress(OSError, ValueError):  # nobody reads it; the engine runs on
                        to.write(chunk)
                        to.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.reader.take(decoded(line))
                rest = rest[-4 * LONGEST :]
        with self.lock:
            if rest:
                self.reader.take(decoded(rest))

    def serving(self) -> bool:
        with self.lock:
            return self.reader.serving

    def report(self) -> Report | None:
        """What was read; None where it is no engine's log."""
        with self.lock, contextlib.suppress(InputError):
            return self.reader.report()
        return None


class _Child:
    """The engine, its streams and the signals meant for it."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], asked: list[int]) -> None:
        self._asked, self._since = asked, 0.0
        try:
            self._process = subprocess.Popen(
                list(argv), env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_dies_with_us(),
            )  # fmt: skip
        except OSError as error:
            raise InputError("the engine cannot be started", got=error.strerror, where=argv[0]) from None

    def watch(self, ready: Callable[[Report], None], out: BinaryIO | None, err: BinaryIO | None) -> Ended:
        log = _Log()
        streams = [(self._process.stdout, out), (self._process.stderr, err)]
        pumps = [threading.Thread(target=log.pump, args=pair, daemon=True) for pair in streams]
        for pump in pumps:
            pump.start()
        served, passed = False, 0
        while (code := self._wait()) is None:
            if not served and log.serving():
                served = True
                self._wait(_SETTLE)
                report = log.report()
                if report is not None:
                    with log.lock:
                        ready(report)
            passed = self._pass_on(passed)
        self._kill_session()
        for pump in pumps:
            pump.join(PATIENCE[1])
        return Ended(code, self._asked[0] if self._asked else None, served or log.serving(), log.report())

    def _wait(self, seconds: float = _POLL) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _pass_on(self, passed: int) -> int:
        """Tell the child of the next signal, or of the next way to end, and return how far we are."""
        if not self._asked:
            return 0
        now = monotonic()
        late = passed and now - self._since > PATIENCE[min(passed, len(PATIENCE)) - 1]
        if passed and len(self._asked) <= passed and not late:
            return passed
        self._since = now
        if passed == 0:
            self._process.send_signal(self._asked[0])
        else:
            self._tell_session(signal.SIGTERM if passed == 1 else signal.SIGKILL)
        return passed + 1

    def _tell_session(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _kill_session(self) -> None:
        self._tell_session(signal.SIGKILL)

    def end(self) -> None:
        """Whatever happened, leave nothing behind."""
        self._kill_session()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def _dies_with_us() -> Callable[[], object] | None:
    """On Linux, what has the kernel end the child when we are gone."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
