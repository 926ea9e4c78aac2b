"""Verbs that look for what is wrong, and mend it: audit, rules, repair, doctor."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import monotonic

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer
from narrowcast.verbs.reports import check_reports, write_report


def run_audit(args: argparse.Namespace) -> int:
    from narrowcast.audit.run import audit
    from narrowcast.report.audit import Spent, audit_page, audit_record
    from narrowcast.report.progress import Progress

    quiet, bars = args.quiet or args.json, []

    def progress(total: int, label: str) -> Progress:
        bars.append(Progress(total, label, quiet=quiet))
        return bars[-1]

    check_reports((args.model, args.against), sarif=args.sarif, html=args.html)
    start = monotonic()
    found = audit(
        args.model,
        against=args.against,
        engine=args.engine,
        gpu=args.gpu,
        tp=args.tp,
        kv_sample=args.kv_sample,
        quick=args.quick,
        select=[code for text in args.select for code in text.split(",")],
        ignore=[code for text in args.ignore for code in ([text] if "=" in text else text.split(","))],
        settings=args.settings,
        workers=args.workers,
        progress=progress,
    )
    read = [
        bar for bar in bars if found.subject.depth in ("codes", "parent")
    ]  # else most bytes were passed over
    spent = Spent(monotonic() - start, sum(bar.done_bytes for bar in read), sum(bar.seconds for bar in read))
    if args.sarif is not None:
        from narrowcast.report.sarif import sarif_text

        write_report(args.sarif, sarif_text(found))
    if args.html is not None:
        from narrowcast.report.audit_page import html_page

        write_report(args.html, html_page(found, spent))
    return answer(args, audit_page(found, spent), audit_record(found, spent)) or int(not found.passed)


def run_rules(args: argparse.Namespace) -> int:
    from narrowcast.report import rules as pages

    if args.name is None:
        return answer(args, pages.rules_page(), {"rules": [row.to_json() for row in pages.rows().values()]})
    row = pages.find(args.name)
    return answer(args, pages.rule_page(row), {"rule": row.to_json()})


def run_repair(args: argparse.Namespace) -> int:
    from narrowcast.repair.run import repair
    from narrowcast.report.progress import Progress
    from narrowcast.report.repair import repair_page

    quiet = args.quiet or args.json
    done = repair(
        args.model,
        args.out,
        only=[name.strip() for text in args.only for name in text.split(",")],
        unity=args.unity_kv,
        container=args.container,
        preset=args.preset,
        dry_run=args.dry_run,
        resume=args.resume,
        progress=lambda total, label: Progress(total, label, quiet=quiet),
    )
    return answer(args, repair_page(done), done.to_json()) or int(not done.passed)


def run_doctor(args: argparse.Namespace) -> int:
    from narrowcast import doctor
    from narrowcast.report import doctor as pages

    if args.symptom is not None:
        if args.log is not None:
            raise UsageError("--symptom takes words, not a log", got=args.log, remedy="one of both")
        if not args.symptom:
            rows = [symptom.to_json() for symptom in doctor.symptoms.values()]
            return answer(args, pages.symptoms_page(), {"symptoms": rows})
        symptom = doctor.find(" ".join(args.symptom))
        return answer(args, pages.symptom_page(symptom), {"symptom": symptom.to_json()})
    if args.log is None and sys.stdin.isatty():
        raise UsageError("no log was given", remedy="narrowcast doctor vllm.log, or pipe the log into it")
    path = None if args.log in (None, "-") else Path(args.log)
    report = doctor.diagnose(doctor.read(path, iter(sys.stdin.buffer)))
    return answer(args, pages.doctor_page(report), dict(report.to_json())) or int(report.failed)
