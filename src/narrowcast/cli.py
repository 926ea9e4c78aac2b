"""The command line: parse, run one verb, and turn what goes wrong into one line and an exit code.

    exit 0  fine          1  findings, or worse than asked     2  usage
         3  bad input     4  undecided or invalid

Errors go to stderr as ``narrowcast: error: ...`` without a traceback; ``--debug`` shows it. Every command
that reports takes ``--json``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from narrowcast.arguments import Runs, check_verb, joined, parsers
from narrowcast.errors import NarrowcastError
from narrowcast.verbs import (
    audits,
    bench,
    calibrate,
    checkpoints,
    engines,
    evaluate,
    gpus,
    numbers,
    plan,
    serve,
    trace,
    verdict,
)
from narrowcast.verbs.answering import discard

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 3, 130, 141

RUNS: Runs = {
    "formats": numbers.run_formats,
    "schemes": numbers.run_schemes,
    "presets": numbers.run_presets,
    "roundtrip": numbers.run_roundtrip,
    "inspect": checkpoints.run_inspect,
    "quantize": checkpoints.run_quantize,
    "convert": checkpoints.run_convert,
    "compare": checkpoints.run_compare,
    "audit": audits.run_audit,
    "rules": audits.run_rules,
    "repair": audits.run_repair,
    "doctor": audits.run_doctor,
    "calibrate": calibrate.run_calibrate,
    "calibrate-kv": calibrate.run_calibrate_kv,
    "evaluate": evaluate.run_evaluate,
    "trace": trace.run_trace,
    "legal": trace.run_legal,
    "verdict": verdict.run_verdict,
    "plan": plan.run_plan,
    "serve": serve.run_serve,
    "bench": bench.run_bench,
    "gpus": gpus.run_gpus,
    "engines": engines.run_engines,
    "vectors": numbers.run_vectors,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; nothing but ``--help`` and ``--version`` exits by itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a sign for a rule gets a question mark
    try:
        check_verb(arguments)
        args = parsers(RUNS)["narrowcast"].parse_args(joined(arguments))
        return int(args.run(args))
    except NarrowcastError as error:
        return _failed(str(error), error.exit_code, debug)
    except KeyboardInterrupt as stopped:
        way_on = f"\n  remedy: {stopped}" if str(stopped) else ""
        return _failed(f"interrupted{way_on}", INTERRUPTED, debug=False)
    except BrokenPipeError:
        discard(sys.stdout)  # the reader went away (head, less)
        return BROKEN_PIPE
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return _failed(
            f"{text}\n  remedy: run with --debug for the traceback, and report it", BAD_INPUT, debug
        )


def _open_closed_streams() -> None:
    """Give closed standard streams to nobody: the next file that is opened would get their number, and with it
    all that is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _failed(text: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    from narrowcast.report.tables import hanging, printable

    lines = [printable(line) for line in f"narrowcast: error: {text}".split("\n")]
    if sys.stderr.isatty():
        lines = [part for line in lines for part in hanging(line)]
    try:
        print("\n".join(lines), file=sys.stderr, flush=True)
    except OSError:  # nobody to tell; the exit code still says it
        discard(sys.stderr)
    return code
