"""Change one key of a JSON text and leave every other byte alone.

A quantized checkpoint's config.json should differ from its parent's in ``quantization_config`` and in nothing
else: not in key order, not in ``1e-05`` against ``1e-5``, not in indentation, not in a NaN that strict JSON
does not know. Parsing and dumping changes all of these, so the text is scanned for its top-level members and
only the span of one of them is replaced, inserted at the end, or cut out. The new member is written in the
style of the first one: its indentation, line ends and colon.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from narrowcast.errors import CheckpointError

REMOVE = object()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class _Member:
    key: str
    start: int  # of the key's opening quote
    colon: str  # the text between key and value
    value: int
    end: int  # behind the value


def edit_config(config: bytes, key: str, value: object = REMOVE) -> bytes:
    """The same JSON text with top-level ``key`` set to ``value``, or without it when no value is given.

    Raises CheckpointError when the text is not one JSON object, or has the key twice.
    """
    try:
        text = config.decode("utf-8")
        members, opening = _members(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("the config is not a JSON object", got=str(error), wanted="{...}") from None
    at = [index for index, member in enumerate(members) if member.key == key]
    if len(at) > 1:
        raise CheckpointError(
            f"the config has {key!r} {len(at)} times", wanted="one", remedy="remove all but one"
        )
    if value is REMOVE:
        return (_cut(text, members, at[0]) if at else text).encode()
    spelled = _spell(text, members, opening, value)
    if at:
        member = members[at[0]]
        return (text[: member.value] + spelled + text[member.end :]).encode()
    if not members:
        return f"{text[:opening]}{json.dumps(key)}: {spelled}{text[opening:]}".encode()
    gap, last = text[opening : members[0].start], members[-1].end
    addition = f",{gap or _between(text, members)}{json.dumps(key)}{members[0].colon}{spelled}"
    return (text[:last] + addition + text[last:]).encode()


def cut_within(config: bytes, outer: str, key: str) -> bytes:
    """The same JSON text without ``key`` in the object that top-level ``outer`` holds.

    Raises CheckpointError when the text is not one JSON object, or has one of the two twice.
    """
    try:
        text = config.decode("utf-8")
        members, _ = _members(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("the config is not a JSON object", got=str(error), wanted="{...}") from None
    at = [member for member in members if member.key == outer]
    if len(at) != 1:
        raise CheckpointError(
            f"the config has {outer!r} {len(at)} times", wanted="one", remedy="remove all but one"
        )
    inner = edit_config(text[at[0].value : at[0].end].encode(), key).decode()
    return (text[: at[0].value] + inner + text[at[0].end :]).encode()


def _members(text: str) -> tuple[list[_Member], int]:
    """The top-level members in order, and the position behind the opening brace."""
    decode = json.JSONDecoder().raw_decode
    opening = _skip(text, text.startswith("\ufeff"))
    _expect(text, opening, "{")
    at = _skip(text, opening + 1)
    members: list[_Member] = []
    while text[at : at + 1] != "}":
        if members:
            _expect(text, at, ",")
            at = _skip(text, at + 1)
        _expect(text, at, '"')
        key, behind_key = decode(text, at)
        colon = _skip(text, behind_key)
        _expect(text, colon, ":")
        value = _skip(text, colon + 1)
        _, end = decode(text, value)
        members.append(_Member(key, at, text[behind_key:value], value, end))
        at = _skip(text, end)
    if _skip(text, at + 1) != len(text):
        raise ValueError(f"text behind the closing brace at character {at + 1}")
    return members, opening + 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, character: str) -> None:
    if text[at : at + 1] != character:
        raise ValueError(f"expected {character} at character {at}, found {text[at : at + 1]!r}")


def _cut(text: str, members: list[_Member], index: int) -> str:
    if index + 1 < len(members):
        return text[: members[index].start] + text[members[index + 1].start :]
    start = members[index - 1].end if index else members[index].start
    return text[:start] + text[members[index].end :]


def _spell(text: str, members: list[_Member], opening: int, value: object) -> str:
    """The value as JSON in the style of the text: on lines with its indentation, or on one line."""
    gap = text[opening : members[0].start] if members else ""
    if "\n" not in gap:
        compact = bool(members) and members[0].colon == ":"
        return json.dumps(value, separators=(",", ":") if compact else (", ", ": "))
    indent = gap[gap.rindex("\n") + 1 :]
    end_of_line = "\r\n" if "\r\n" in gap else "\n"
    return json.dumps(value, indent=indent).replace("\n", end_of_line + indent)


def _between(text: str, members: list[_Member]) -> str:
    """The space that separates members on one line."""
    if len(members) < 2:
        return members[0].colon.removeprefix(":")
    return text[members[0].end : members[1].start].lstrip(" \t\r\n").removeprefix(",")
