"""The verb that serves: the command, and the engine as a child that is watched."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer

if TYPE_CHECKING:
    from narrowcast.doctor import Report
    from narrowcast.hardware.gpus import GPU
    from narrowcast.serving.command import Command
    from narrowcast.serving.question import Question
    from narrowcast.serving.running import Ended
    from narrowcast.serving.served import Served


def run_serve(args: argparse.Namespace) -> int:
    from narrowcast.hardware.own_gpus import named
    from narrowcast.report import serve as pages
    from narrowcast.serving import running
    from narrowcast.serving.command import command
    from narrowcast.serving.question import Question

    if args.port is not None and not 0 < args.port < 1 << 16:
        raise UsageError("there is no such port", got=args.port, wanted="1 to 65535")
    if args.gpus_per_node < 1:
        raise UsageError("a machine has at least one GPU", got=args.gpus_per_node)
    gpu = named(args.gpu)
    served = _served(args, gpu)
    question = Question(
        gpu, args.engine, args.tp, args.pp, args.ep, args.context, args.batch, args.kv, args.utilisation
    )  # fmt: skip
    made = command(
        served, question, port=args.port, host=args.host, name=args.name, extra=args.extra,
        quantization=args.quantization, gpus_per_node=args.gpus_per_node, environment=os.environ,
    )  # fmt: skip
    argv = running.found(made, python=args.python, executable=args.executable)
    page, facts = pages.command_page(made), {"command": made.to_json(), "installed": argv is not None}
    if args.dry_run or argv is None:
        why = pages.absent(made) if argv is None and not args.dry_run else []
        return answer(args, [*page, *([""] if why else []), *why], facts)
    _check(made)
    running.write_files(made)
    if not args.json:
        answer(args, [*page, "", f"starting {argv[0]}; Ctrl-C stops it", ""], facts)
    return _watch(args, served, question, made, argv, facts)


def _served(args: argparse.Namespace, gpu: GPU) -> Served:
    """The model as it is, or as the asked preset would write it, in the container that the engine reads best."""
    from narrowcast.hardware.engines import engines
    from narrowcast.serving.loading import load
    from narrowcast.serving.variants import Variants
    from narrowcast.tensors.presets import presets

    if args.preset is None or args.container is not None:
        return load(args.model, preset=args.preset, container=args.container)
    variants = Variants(args.model, load(args.model), engines[args.engine].name, gpu)
    if variants.quantized:
        load(args.model, preset=args.preset)  # says why a quantized model takes no preset
    return variants.written(presets[args.preset].name)


def _check(made: Command) -> None:
    """Refuse to start what cannot serve."""
    if made.refusals:
        raise UsageError(
            "the engine would refuse this model",
            got="; ".join(made.refusals),
            remedy="--dry-run shows the command",
        )
    done = ("ray ", "narrowcast quantize ") if Path(made.model).exists() else ("ray ",)
    waiting = [line for line in made.before if not line.startswith(done)]
    if waiting:
        raise UsageError(
            "something has to be done before the engine starts", got="; ".join(waiting),
            remedy="do it, then serve what it makes; --dry-run shows the command",
        )  # fmt: skip
    open_ = [flag for flag in made.flags if flag.value in ("RANK", "FIRST:20000")]
    if open_:
        raise UsageError(
            "each machine has values of its own", got=", ".join(flag.name for flag in open_),
            remedy=f"give them behind --: {' '.join(f'{flag.name} {flag.value}' for flag in open_)}",
        )  # fmt: skip


def _watch(
    args: argparse.Namespace, served: Served, question: Question, made: Command, argv: tuple[str, ...],
    facts: dict[str, Any],
) -> int:  # fmt: skip
    from narrowcast.report import serve as pages
    from narrowcast.serving import running
    from narrowcast.serving.beside import beside

    told = False

    def ready(report: Report) -> None:
        nonlocal told
        told = True
        rows = beside(served, question, made, report)
        found = {"running": dict(report.to_json()), "beside": [row.to_json() for row in rows]}
        answer(args, [*pages.running_page(report, rows), ""], facts | found)

    out = None if args.quiet else (sys.stderr if args.json else sys.stdout).buffer
    err = None if args.quiet else sys.stderr.buffer
    ended = running.run(argv, made.environment, ready=ready, out=out, err=err)
    if not told and ended.report is not None:
        ready(ended.report)
    elif not told:
        answer(args, [], facts | {"running": None, "beside": []})
    print(f"narrowcast: {_end(made, ended)}", file=sys.stderr, flush=True)
    return ended.exit_code


def _end(made: Command, ended: Ended) -> str:
    from narrowcast.doctor.rows import NAMES

    how = f"exit code {ended.code}" if ended.code >= 0 else f"killed by {signal.Signals(-ended.code).name}"
    why = f" after {signal.Signals(ended.signal).name}" if ended.signal is not None else ""
    served = "" if ended.served else "; it never served"
    return f"{NAMES[made.engine]} ended{why}: {how}{served}"
