"""The frame of a page for people: one HTML file with everything inside, that loads nothing from anywhere.

What comes from files, names and models is escaped here, and control characters and marks that turn text around are
replaced, so that none of it can change the page.
"""

from __future__ import annotations

from html import escape

from narrowcast._version import __version__
from narrowcast.report.drawing import Drawn
from narrowcast.report.tables import printable


def whole(title: str, verb: str, parts: list[str], style: str, script: str = "") -> str:
    """The file: ``parts`` are HTML, ``title`` is text; ``verb`` made it."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}: {verb}</title>"
    )
    body = "\n".join([*parts, f"<footer>narrowcast {__version__} {verb}</footer>"])
    runs = f"\n<script>{script}</script>" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}\n<style>{style}</style></head>\n'
        f"<body><main>\n{body}\n</main>{runs}</body></html>\n"
    )


def escaped(said: object) -> str:
    """Text as HTML."""
    return escape(printable(str(said)))


def coded(said: object) -> str:
    """Text in the font of code."""
    return f"<code>{escaped(said)}</code>"


def facts(pairs: list[tuple[str, str]]) -> str:
    """Names with their HTML values; those without a value are left out."""
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in pairs if value)}</dl>"


def figure(drawn: Drawn) -> str:
    """A plot with its title and what it shows."""
    title = f"<figcaption><b>{escaped(drawn.title)}</b></figcaption>"
    return f"<figure>{title}{drawn.svg}<p>{escaped(drawn.caption)}</p></figure>"
