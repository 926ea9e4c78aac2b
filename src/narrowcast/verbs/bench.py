"""The verb that measures: bench."""

from __future__ import annotations

import argparse

from narrowcast.verbs.answering import answer
from narrowcast.verbs.running import check_libraries


def run_bench(args: argparse.Namespace) -> int:
    check_libraries()
    from narrowcast.report.bench import bench_page
    from narrowcast.report.progress import Progress
    from narrowcast.serving.bench import bench

    quiet = args.quiet or args.json
    found = bench(
        args.model, against=args.against, batches=args.batch, prompt=args.prompt, tokens=args.tokens,
        engine=args.engine, python=args.python, threads=args.threads, extra=args.extra,
        progress=lambda total, label: Progress(total, label, quiet=quiet, unit="steps"),
    )  # fmt: skip
    return answer(args, bench_page(found), found.to_json())
