"""Verbs that look inside a running model: trace, legal."""

from __future__ import annotations

import argparse

from narrowcast.verbs.answering import answer
from narrowcast.verbs.running import check_libraries


def run_trace(args: argparse.Namespace) -> int:
    check_libraries()
    from tempfile import gettempdir

    from narrowcast.report.progress import Progress
    from narrowcast.report.trace import trace_page
    from narrowcast.studies.trace import trace

    quiet = args.quiet or args.json
    found = trace(
        args.model, args.text, dtype=args.dtype, online=args.online, context=args.context, tokens=args.tokens,
        spool=gettempdir() if args.stream else None,
        progress=lambda total, label: Progress(total, label, quiet=quiet, unit="steps"),
    )  # fmt: skip
    return answer(args, trace_page(found), found.to_json()) or int(found.chain is not None)


def run_legal(args: argparse.Namespace) -> int:
    check_libraries()
    from narrowcast.report.legal import legal_page
    from narrowcast.report.plots import check_plot
    from narrowcast.report.progress import Progress
    from narrowcast.studies.legal import legal

    if args.plot is not None:
        check_plot(args.plot)
    quiet = args.quiet or args.json
    found = legal(
        args.model, args.text, only=args.only, context=args.context, tokens=args.tokens,
        progress=lambda total, label: Progress(total, label, quiet=quiet, unit="steps"),
    )  # fmt: skip
    if args.plot is not None:
        from narrowcast.report.legal_figure import plot_legal

        plot_legal([(cell, found.reading(cell)) for cell in found.cells], args.plot)
    return answer(args, legal_page(found), found.to_json())
