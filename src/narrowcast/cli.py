"""The command line: one function per verb, no logic, nothing heavy imported before it is needed.

    exit 0  fine          1  findings, or worse than asked     2  usage
         3  bad input     4  undecided or invalid

Errors go to stderr as ``narrowcast: error: ...`` without a traceback; ``--debug`` shows it. Every command
that reports takes ``--json``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from narrowcast.arguments import Runs, check_verb, joined, parsers
from narrowcast.errors import NarrowcastError, StorageError, UsageError

if TYPE_CHECKING:
    from narrowcast.jobs.plan import Plan
    from narrowcast.jobs.quantize import Result

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 3, 130, 141
INSTEAD = {
    ("gguf", "preset"): "--type says what matrices become",
    ("gguf", "dtype"): "--type says what matrices become",
    ("onnx", "preset"): "quantize or convert to it first, then export what that made",
    ("onnx", "ignore"): "--targets picks the matrices to export",
}


def run_formats(args: argparse.Namespace) -> int:
    from narrowcast.numbers.formats import formats
    from narrowcast.report import formats as pages

    _needs(args.row, row=("scheme", args.scheme), rule=("rule", args.rule), span=("span", args.span))
    if args.row is not None:
        if args.name is not None:
            raise UsageError("--row takes schemes, not a format", got=args.name, remedy="--scheme fp8_tensor")
        return _show_row(args)
    if args.value is not None or args.bits is not None:
        return _show_explained(args)
    if args.name is None:
        rows = [pages.format_record(fmt) for fmt in formats.values()]
        return _answer(args, pages.formats_page(), {"formats": rows})
    fmt = formats[args.name]
    return _answer(args, pages.format_page(fmt), {"format": pages.format_record(fmt)})


def _needs(given: object, **flags: tuple[str, object]) -> None:
    for name, value in flags.values():
        if value is not None and given is None:
            raise UsageError(f"--{name} goes with --row", remedy='--row "0.02 -0.5 1.3" --scheme fp8_tensor')


def _show_explained(args: argparse.Namespace) -> int:
    from narrowcast.jobs.explain import explain, meanings, parse_bits, parse_value
    from narrowcast.numbers.formats import formats
    from narrowcast.report import explain as pages

    rows = [formats[args.name]] if args.name else []
    if args.bits is not None:
        code, width = parse_bits(args.bits)
        found = meanings(code, width, rows)
        return _answer(
            args, pages.bits_page(code, width, found), {"bits": pages.bits_record(code, width, found)}
        )
    explained = [explain(parse_value(args.value), fmt) for fmt in rows or formats.values()]
    page = pages.value_page(explained[0]) if rows else pages.values_page(explained)
    return _answer(args, page, {"values": [pages.value_record(e) for e in explained]})


def _show_row(args: argparse.Namespace) -> int:
    from narrowcast.jobs.explain import parse_row, scaled_row
    from narrowcast.report import explain as pages

    if args.scheme is None:
        raise UsageError("--row needs a --scheme", remedy="--scheme fp8_tensor,int8_tensor")
    row = parse_row(args.row)
    scaled = [scaled_row(row, scheme) for scheme in _trials(args.scheme, args)]
    return _answer(args, pages.row_page(row, scaled), {"row": pages.row_record(row, scaled)})


def _trials(names: str, args: argparse.Namespace) -> list[Any]:
    """Schemes by name, under every rule and span that was asked for."""
    from narrowcast.jobs.explain import parse_value
    from narrowcast.jobs.roundtrip import check_rules, variants
    from narrowcast.tensors.schemes import schemes

    chosen = [schemes[name] for name in _listed(names)]
    rules, spans = _listed(args.rule), [parse_value(span) for span in _listed(args.span)]
    check_rules(chosen, rules, spans)
    return [variant for scheme in chosen for variant in variants(scheme, rules, spans)]


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def run_schemes(args: argparse.Namespace) -> int:
    from narrowcast.report import schemes as pages
    from narrowcast.tensors.schemes import schemes

    shape = pages.parse_shape(args.shape) if args.shape else pages.SHAPE
    if args.name is None:
        rows = [pages.scheme_record(scheme, shape) for scheme in schemes.values()]
        return _answer(args, pages.schemes_page(shape), {"schemes": rows})
    scheme = schemes[args.name]
    return _answer(args, pages.scheme_page(scheme, shape), {"scheme": pages.scheme_record(scheme, shape)})


def run_presets(args: argparse.Namespace) -> int:
    from narrowcast.report import schemes as pages
    from narrowcast.tensors.presets import presets

    shape = pages.parse_shape(args.shape) if args.shape else pages.SHAPE
    if args.name is None:
        rows = [pages.preset_record(preset, shape) for preset in presets.values()]
        return _answer(args, pages.presets_page(shape), {"presets": rows})
    preset = presets[args.name]
    return _answer(args, pages.preset_page(preset, shape), {"preset": pages.preset_record(preset, shape)})


def run_roundtrip(args: argparse.Namespace) -> int:
    from narrowcast.jobs.roundtrip import FORMATS, SCHEMES, load_source, roundtrip
    from narrowcast.report.roundtrip import roundtrip_page, roundtrip_record

    neither = args.formats is None and args.schemes is None
    names = _listed(args.formats) if not neither else list(FORMATS)
    trials = _trials(args.schemes or (",".join(SCHEMES) if neither else ""), args)
    if not names and not trials:
        raise UsageError("nothing to try", wanted="--formats or --schemes with names")
    x, source = load_source(args.source, args.seed)
    trips = roundtrip(x, names, trials, source)
    page = roundtrip_page(args.source, x.shape, source.name, trips)
    return _answer(args, page, roundtrip_record(args.source, x.shape, source.name, args.seed, trips))


def run_inspect(args: argparse.Namespace) -> int:
    from narrowcast.jobs.inspect import inspect
    from narrowcast.report.inspect import inspect_page

    found = inspect(args.model)
    return _answer(args, inspect_page(found), found.to_json())


def run_quantize(args: argparse.Namespace) -> int:
    from narrowcast.jobs.quantize import plan
    from narrowcast.report import quantize as pages

    settled = plan(
        args.model,
        args.out,
        args.preset,
        container=args.container,
        ignore=args.ignore,
        targets=args.targets,
        recipe=args.recipe,
        rule=args.rule,
        strict=args.strict,
        nonfinite=args.nonfinite,
        workers=args.workers,
    )
    return _job(args, settled, pages.plan_page, pages.result_page)


def run_convert(args: argparse.Namespace) -> int:
    from narrowcast.jobs.convert import plan
    from narrowcast.report import convert as pages

    if args.to == "gguf":
        return _run_gguf(args)
    if args.type is not None:
        raise UsageError("--type goes with --to gguf", got=args.type)
    if args.to == "onnx":
        from narrowcast.jobs.export import export_onnx

        _takes_not(
            args, ("preset", "ignore", "dtype", "requantize", "saturate", "parent", "dry_run", "resume")
        )
        exported = export_onnx(args.model, args.out, args.targets)
        return _answer(args, pages.onnx_page(exported), exported.to_json())
    settled = plan(
        args.model,
        args.out,
        args.to,
        preset=args.preset,
        ignore=args.ignore,
        targets=args.targets,
        dtype=args.dtype,
        requantize=args.requantize,
        saturate=args.saturate,
        parent=args.parent,
        workers=args.workers,
    )
    return _job(args, settled, pages.plan_page, pages.result_page)


def _run_gguf(args: argparse.Namespace) -> int:
    from narrowcast.jobs.gguf import write_gguf
    from narrowcast.report import convert as pages
    from narrowcast.report.progress import Progress

    _takes_not(args, ("preset", "ignore", "targets", "dtype", "saturate", "parent", "dry_run", "resume"))
    quiet = args.quiet or args.json
    written = write_gguf(
        args.model,
        args.out,
        kind=args.type,
        requantize=args.requantize,
        workers=args.workers,
        progress=lambda total, label: Progress(total, label, quiet=quiet),
    )
    return _answer(args, pages.gguf_page(written), written.to_json())


def _takes_not(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Options of other conversions would be ignored."""
    for name in names:
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does not go with --to {args.to}",
                remedy=INSTEAD.get((args.to, name), "leave it out"),
            )


def _job(
    args: argparse.Namespace,
    settled: Plan,
    plan_page: Callable[[Plan], list[str]],
    result_page: Callable[[Result], list[str]],
) -> int:
    """Show a plan, or carry it out and show what came of it."""
    from narrowcast.jobs.quantize import run
    from narrowcast.report.progress import Progress
    from narrowcast.store.places import check_absent, check_place

    if args.dry_run:
        check_place(settled.place, settled.root)
        check_absent(settled.place)
        return _answer(args, plan_page(settled), settled.to_json())
    quiet = args.quiet or args.json
    result = run(
        settled, resume=args.resume, progress=lambda total, label: Progress(total, label, quiet=quiet)
    )
    return _answer(args, result_page(result), result.to_json())


def run_compare(args: argparse.Namespace) -> int:
    from narrowcast.jobs.compare import compare
    from narrowcast.report.compare import compare_page
    from narrowcast.report.progress import Progress

    quiet = args.quiet or args.json
    found = compare(
        args.a,
        args.b,
        only=args.only,
        min_sqnr=args.min_sqnr,
        workers=args.workers,
        progress=lambda total, label: Progress(total, label, quiet=quiet),
    )
    return _answer(args, compare_page(found), found.to_json()) or int(not found.passed)


def run_vectors(args: argparse.Namespace) -> int:
    from narrowcast.jobs.vectors import vectors, write
    from narrowcast.report.schemes import parse_shape
    from narrowcast.report.vectors import vectors_page, vectors_record

    made = vectors(args.name, parse_shape(args.shape), args.seed, args.input)
    files = write(made, args.out)
    return _answer(args, vectors_page(made, files), vectors_record(made, files))


RUNS: Runs = {
    "formats": run_formats,
    "schemes": run_schemes,
    "presets": run_presets,
    "roundtrip": run_roundtrip,
    "inspect": run_inspect,
    "quantize": run_quantize,
    "convert": run_convert,
    "compare": run_compare,
    "vectors": run_vectors,
}


def _answer(args: argparse.Namespace, page: list[str], facts: dict[str, Any]) -> int:
    """Print the page for people or the record for machines."""
    if args.json:
        from narrowcast.report.records import record

        text = record(args.verb, facts)
    else:
        from narrowcast.report.tables import printable

        text = "\n".join(printable(line) for line in page)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(sys.stdout)
        raise StorageError("standard output cannot be written", got=error.strerror) from None
    return 0


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
        _discard(sys.stdout)  # the reader went away (head, less)
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
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _discard(stream: TextIO) -> None:
    """Let a stream that failed end in nothing, or the interpreter complains once more on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
        _discard(sys.stderr)
    return code
