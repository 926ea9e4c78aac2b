"""The verb about accelerators: gpus."""

from __future__ import annotations

import argparse

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer


def run_gpus(args: argparse.Namespace) -> int:
    from narrowcast.hardware.own_gpus import HERE, known
    from narrowcast.report.gpus import gpu_page, gpu_record, gpus_page

    if args.here or (args.name or "").strip().lower() == HERE:
        if args.here and args.name is not None:
            raise UsageError("--here is this machine's GPU", got=args.name, remedy="leave one of them out")
        return _show_here(args)
    rows = known(args.gpus)
    if args.name is None:
        return answer(args, gpus_page(rows), {"gpus": [gpu_record(row) for row in rows.values()]})
    row = rows[args.name]
    return answer(args, gpu_page(row), {"gpu": gpu_record(row)})


def _show_here(args: argparse.Namespace) -> int:
    """Each kind of GPU once, with how many of it there are."""
    from narrowcast.hardware.machine import detected
    from narrowcast.report.gpus import gpu_page, gpu_record

    found = detected()
    kinds = list(dict.fromkeys(found))
    page: list[str] = []
    for kind in kinds:
        page += ([""] if page else []) + gpu_page(kind, found.count(kind))
    return answer(args, page, {"here": [gpu_record(row) for row in found]})
