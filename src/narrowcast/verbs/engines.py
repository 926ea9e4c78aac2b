"""``narrowcast engines``: what engines call things."""

from __future__ import annotations

import argparse

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer


def run_engines(args: argparse.Namespace) -> int:
    from narrowcast.hardware.engines import ENGINES, engines
    from narrowcast.report import engines as pages

    known = {word: word.lower().replace("_", "-") for word in args.names}
    asked = list(dict.fromkeys(name for name in known.values() if name in ENGINES))
    words = [word for word, name in known.items() if name not in ENGINES]
    if words:
        return _show_names(args, words, asked)
    if not asked:
        records = [pages.engine_record(engine) for engine in engines.values()]
        return answer(args, pages.engines_page(), {"engines": records})
    if len(asked) == 1:
        engine = engines[asked[0]]
        return answer(args, pages.engine_page(engine), {"engine": pages.engine_details(engine)})
    if set(asked) != {"vllm", "sglang"}:
        raise UsageError("only two engines stand side by side", got=", ".join(asked), wanted="vllm sglang")
    return answer(args, pages.factorings_page(), {"factorings": pages.factoring_records()})


def _show_names(args: argparse.Namespace, words: list[str], asked: list[str]) -> int:
    from narrowcast.hardware import names
    from narrowcast.report import engines as pages

    found = [row for word in words for row in names.find(word, among=asked)]
    return answer(args, pages.name_page(found), {"names": [pages.name_record(row) for row in found]})
