"""Verbs about checkpoints: inspect, quantize, convert, compare."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer

if TYPE_CHECKING:
    from narrowcast.jobs.plan import Plan
    from narrowcast.jobs.quantize import Result

INSTEAD = {
    ("gguf", "preset"): "--type says what matrices become",
    ("gguf", "dtype"): "--type says what matrices become",
    ("onnx", "preset"): "quantize or convert to it first, then export what that made",
    ("onnx", "ignore"): "--targets picks the matrices to export",
}


def run_inspect(args: argparse.Namespace) -> int:
    from narrowcast.jobs.inspect import inspect
    from narrowcast.report.inspect import inspect_page

    found = inspect(args.model)
    return answer(args, inspect_page(found), found.to_json())


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
        stats=args.stats,
        stat=args.stat,
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
        return answer(args, pages.onnx_page(exported), exported.to_json())
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
    return answer(args, pages.gguf_page(written), written.to_json())


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
        return answer(args, plan_page(settled), settled.to_json())
    quiet = args.quiet or args.json
    result = run(
        settled, resume=args.resume, progress=lambda total, label: Progress(total, label, quiet=quiet)
    )
    return answer(args, result_page(result), result.to_json())


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
    return answer(args, compare_page(found), found.to_json()) or int(not found.passed)
