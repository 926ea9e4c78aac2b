"""Verbs that run text to find scales: calibrate, calibrate-kv."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer
from narrowcast.verbs.running import check_libraries

if TYPE_CHECKING:
    from narrowcast.audit.findings import Finding
    from narrowcast.jobs.stream import ProgressFactory


def run_calibrate(args: argparse.Namespace) -> int:
    check_libraries()
    from narrowcast.report.calibrate import calibrate_page
    from narrowcast.studies.calibrate import calibrate, merge

    if args.merge:
        _refuse(args, "--merge puts files together and runs no model", ("model", "text", "tokens", "context"))
        done = merge(args.merge, args.out)
        return answer(args, calibrate_page(done), done.to_json())
    if args.model is None:
        raise UsageError(
            "no model and no files to merge", remedy="narrowcast calibrate MODEL -o stats.safetensors"
        )
    done = calibrate(
        args.model,
        args.out,
        args.text,
        **_chosen(args, "tokens", "context", "dtype"),
        resume=args.resume,
        progress=_progress(args),
    )
    return answer(args, calibrate_page(done), done.to_json())


def run_calibrate_kv(args: argparse.Namespace) -> int:
    check_libraries()
    from narrowcast.repair.kv_scales import check_target, write_kv_scales
    from narrowcast.report.calibrate import calibrate_kv_page
    from narrowcast.studies.calibrate_kv import calibrate_kv, save_overlay

    if args.stats is not None:
        _refuse(args, "--stats brings what was seen, so nothing is run for it", ("tokens",))
    progress = _progress(args)
    check_target(args.model, args.out, "fp8_head" if args.heads else "fp8", args.overlay)
    found = calibrate_kv(
        args.model,
        args.text,
        stats=args.stats,
        stat=args.stat,
        heads=args.heads,
        **_chosen(args, "tokens", "context", "measure", "dtype"),
        progress=progress,
    )
    left: tuple[Finding, ...] = ()
    if args.overlay:
        save_overlay(found, args.out)
    else:
        left = write_kv_scales(args.model, args.out, found.scales, resume=args.resume, progress=progress).left
    facts = {"out": args.out, **found.to_json(), "left": [one.to_json() for one in left]}
    failed = any(one.severity == "error" for one in left)
    return answer(args, calibrate_kv_page(found, args.out, left), facts) or int(failed)


def _progress(args: argparse.Namespace) -> ProgressFactory:
    """What is counted goes by what is done: tokens through layers, steps of several runs, bytes that are written."""
    from narrowcast.report.progress import Progress

    units = {"calibrating": "tokens", "running": "steps"}
    return lambda total, label: Progress(total, label, quiet=args.quiet or args.json, unit=units.get(label))


def _chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options that were given; the others have defaults where they are used."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _refuse(args: argparse.Namespace, problem: str, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(args, name) not in (None, [])]
    if given:
        raise UsageError(problem, got=", ".join(given), remedy="one or the other")
