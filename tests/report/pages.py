"""Reads HTML pages, and checks that they are whole in themselves."""

from __future__ import annotations

import re
from html.parser import HTMLParser

LOADS = {"src", "srcset", "data", "poster", "action", "background", "ping"}
VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Every tag, every attribute, all text; complains about tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_decl(self, decl: str) -> None:
        assert decl == "doctype html"

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check_whole(page: str) -> Reader:
    """Nothing in the page is fetched from anywhere, and it is well formed."""
    read = Reader(page)
    for tag, attributes in read.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img", "image", "audio", "video")
        assert not LOADS & set(attributes)
        assert all(
            value is not None and value.startswith("#")
            for key, value in attributes.items()
            if key.endswith("href")
        )
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert {
        url for url in outside if not url.startswith("http://www.w3.org/")
    } == set()  # names of namespaces
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    return read
