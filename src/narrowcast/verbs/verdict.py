"""The verb that judges one model against another by what both answered: verdict."""

from __future__ import annotations

import argparse
from typing import Literal

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer


def run_verdict(args: argparse.Namespace) -> int:
    from narrowcast.report.verdict import verdict_page
    from narrowcast.studies.verdict import EFFECT, verdict

    kinds: list[Literal["failures", "successes"]] = ["failures", "successes"]
    counted = [kind for kind in kinds if getattr(args, kind) is not None]
    if counted:
        return _run_counters(args, counted)
    if args.b is None:
        got = "nothing" if args.a is None else args.a
        raise UsageError(
            "a verdict needs the answers of two models", got=got, remedy="narrowcast verdict PARENT QUANTIZED"
        )
    found = verdict(
        args.a,
        args.b,
        effect=EFFECT if args.effect is None else args.effect,
        confidence=args.confidence,
        metric=args.metric,
        filter=args.filter,
        cluster=args.cluster,
        k=args.k,
    )
    return answer(args, verdict_page(found), found.to_json()) or found.reading.exit_code


def _run_counters(args: argparse.Namespace, counted: list[Literal["failures", "successes"]]) -> int:
    from narrowcast.report.verdict import canary_page
    from narrowcast.statistics.sequential import Counter
    from narrowcast.studies.verdict_counters import canary

    unfit = {"a": None, "metric": None, "filter": None, "cluster": None, "k": 1}
    other = next((name for name, empty in unfit.items() if getattr(args, name) != empty), None)
    if len(counted) > 1 or other is not None:
        raise UsageError(
            "counters are judged alone",
            got=f"{counted[0]} and {counted[1] if len(counted) > 1 else other}",
            remedy="one pair",
        )
    a, b = (Counter(*pair) for pair in getattr(args, counted[0]))
    found = canary(a, b, counted[0], effect=args.effect, confidence=args.confidence)
    return answer(args, canary_page(found), found.to_json()) or found.reading.exit_code
