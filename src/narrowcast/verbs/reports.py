"""Reports that are written to files beside what a command answers: refused before the work, not after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from narrowcast.errors import StorageError, UsageError

REPORTS = (".sarif", ".html")


def check_reports(models: Sequence[str | None], *, sarif: str | None = None, html: str | None = None) -> None:
    """Refuse files that cannot be written, those that are pieces of one of ``models``, and a page without what draws
    its plots."""
    files = [Path(file) for file in (sarif, html) if file is not None]
    if len({file.absolute() for file in files}) < len(files):
        raise UsageError("both reports have one name", got=files[0], remedy="give each its own")
    for file in files:
        if file.is_dir() or not file.absolute().parent.is_dir():
            got = "a directory" if file.is_dir() else f"no directory {file.absolute().parent}"
            raise StorageError("the report cannot be written", where=file, got=got)
        if file.is_file() and file.suffix not in REPORTS:
            _check_replaced(file, models)
    if html is not None:
        from narrowcast.report.drawing import check_library

        check_library()


def _check_replaced(file: Path, models: Sequence[str | None]) -> None:
    for model in models:
        root = Path(model).resolve() if model is not None else None
        if root is not None and root.exists() and file.resolve().is_relative_to(root):
            raise UsageError(
                "the report would replace a file of the model", where=file, remedy="give it another name"
            )


def write_report(file: str, text: str) -> None:
    """Write one report; StorageError where that fails."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError("the report cannot be written", where=file, got=error.strerror) from None
