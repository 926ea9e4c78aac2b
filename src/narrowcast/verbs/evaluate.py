"""Run a model and judge it: evaluate."""

from __future__ import annotations

import argparse

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer
from narrowcast.verbs.reports import check_reports, write_report
from narrowcast.verbs.running import check_libraries


def run_evaluate(args: argparse.Namespace) -> int:
    check_libraries()
    check_reports((args.model, args.against), html=args.html)
    from narrowcast.report.evaluate import evaluate_page
    from narrowcast.report.progress import Progress
    from narrowcast.studies.evaluate import CONTEXT, PROMPTS, TOKENS, Options, evaluate
    from narrowcast.studies.evaluation import Asked

    if args.against is None and args.online is None:
        for flag, said in (("--max-kl", args.max_kl), ("--min-top1", args.min_top1)):
            if said is not None:
                raise UsageError(f"{flag} compares with a parent, and there is none", remedy="add --against")
    if args.stream and (args.greedy or args.retrieval or args.schema):
        raise UsageError(
            "--stream never has a whole model in memory, and generating needs one",
            remedy="leave out --greedy, --retrieval and --schema, or --stream",
        )
    tokens = args.tokens if args.tokens is not None else None if args.text else TOKENS
    quiet = args.quiet or args.json
    found = evaluate(
        args.model,
        args.against,
        online=args.online,
        text=args.text,
        dtype=args.dtype,
        options=Options(
            tokens=tokens,
            context=CONTEXT if args.context is None else args.context,
            caches=[mode.strip() for mode in args.kv.split(",")] if args.kv else [],
            scales=args.kv_scales,
            attention=args.attention,
            greedy=0 if args.stream else PROMPTS if args.greedy is None else args.greedy,
            retrieval=args.retrieval,
            schema=args.schema,
            stream=args.stream,
            accumulate=args.accumulate,
            asked=Asked(args.max_kl, args.min_top1),
        ),
        progress=lambda total, label: Progress(total, label, quiet=quiet, unit="steps"),
    )
    if args.html is not None:
        from narrowcast.report.evaluate_page import html_page

        write_report(args.html, html_page(found))
    return answer(args, evaluate_page(found), found.to_json()) or found.code
