"""Print what a command answers: the page for people or the record for machines."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, TextIO

from narrowcast.errors import StorageError


def answer(args: argparse.Namespace, page: list[str], facts: dict[str, Any]) -> int:
    """Print the page for people or the record for machines."""
    if args.json:
        from narrowcast.report.records import record

        text = record(args.verb, facts)
    else:
        from narrowcast.report.tables import printable

        text = "\n".join(printable(line) for line in page)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise StorageError("standard output cannot be written", got=error.strerror) from None
    return 0


def discard(stream: TextIO) -> None:
    """Let a stream that failed end in nothing, or the interpreter complains once more on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
