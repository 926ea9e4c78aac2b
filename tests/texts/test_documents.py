"""Texts as they come: other newlines, byte order marks, damaged files, and scripts without spaces."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from narrowcast.errors import InputError, NarrowcastError
from narrowcast.texts.documents import read


def put(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_line_of_json_ends_at_its_newline_only(tmp_path: Path) -> None:
    """U+2028, U+0085 and form feeds end lines for str.splitlines, and are plain text in JSON."""
    rows = ["one\u2028two \x85 three", "four\u2029five"]
    lines = "\r\n".join(json.dumps({"text": row}, ensure_ascii=False) for row in rows)
    assert [one.text for one in read([put(tmp_path, "a.jsonl", lines)]).documents] == rows


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = "one two" if name == "a.txt" else json.dumps({"text": "one two"})
    found = read([put(tmp_path, name, b"\xef\xbb\xbf" + content.encode())])
    assert found.documents[0].text == "one two"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"caf\xe9 noir", "byte 3"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "byte 13"),
        ("a.json", b'{"text": "caf\xe9"}', "byte 13"),
        ("a.jsonl", '{"text": "one \\ud800 two"}', "surrogate"),
        ("a.jsonl", "[" * 100_000, "nested"),
        ("a.json", "[" * 100_000, "nested"),
        ("a.jsonl", "1" * 5000, "digits"),
        ("a.parquet", b"PAR1 and then nothing", "parquet"),
    ],
)
def test_what_is_no_text_is_refused_by_name(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    source = put(tmp_path, name, content)
    with pytest.raises(InputError, match=said) as caught:
        read([source])
    assert name in str(caught.value)


def test_parquet_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def table(name: str, **columns: list[object]) -> str:
        parquet.write_table(arrow.table(columns), tmp_path / name)
        return str(tmp_path / name)

    found = read([table("good.parquet", id=[1, 2, 3], text=["one two", None, "three"])])
    assert [one.text for one in found.documents] == ["one two", "three"]
    with pytest.raises(NarrowcastError, match="no text column"):
        read([table("none.parquet", id=[1, 2])])
    with pytest.raises(NarrowcastError, match="holds int64"):
        read([table("numbers.parquet", text=[1, 2])])


def test_the_hash_sees_where_documents_end(tmp_path: Path) -> None:
    """The equation of the docstring, and texts that are alike only when they are run together."""
    hashes = []
    for cut in (2, 3):
        parts = "abcdef"[:cut], "abcdef"[cut:]
        for name, part in zip(("a.txt", "b.txt"), parts, strict=True):
            (tmp_path / name).write_text(part)
        hashes.append(read([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]).sha256)
        wanted = b"".join(len(part).to_bytes(8, "little") + part.encode() for part in parts)
        assert hashes[-1] == hashlib.sha256(wanted).hexdigest()
    assert hashes[0] != hashes[1]
