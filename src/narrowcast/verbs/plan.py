"""The verb that plans: plan."""

from __future__ import annotations

import argparse

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer


def run_plan(args: argparse.Namespace) -> int:
    from narrowcast.report.plan import plan_page, plan_record, plans_page, write_figure
    from narrowcast.serving.plan import plan

    names = list(dict.fromkeys(args.gpu or ["here"]))
    if args.plot is not None:
        from narrowcast.report.plots import check_plot

        check_plot(args.plot)
        if len(names) > 1:
            raise UsageError("--plot draws one GPU", got=", ".join(names))
    asked = {
        key: getattr(args, key)
        for key in ("engine", "tp", "pp", "ep", "context", "batch", "preset", "container", "kv", "utilisation",
                    "evaluations", "gpus")
    }  # fmt: skip
    plans = [plan(args.model, name, **asked) for name in names]
    if args.plot is not None:
        write_figure(plans[0], args.plot)
    page = plan_page(plans[0]) if len(plans) == 1 else plans_page(plans)
    return answer(args, page, plan_record(plans))
