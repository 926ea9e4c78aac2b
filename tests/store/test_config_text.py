"""One key changes, every other byte stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import CheckpointError
from narrowcast.store.config_text import edit_config

QUANTIZATION = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": {}}}
TWO_SPACES = (
    b'{\n  "architectures": [\n    "LlamaForCausalLM"\n  ],\n  "rms_norm_eps": 1e-05,\n  "x": 1E+2\n}\n'
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_insertion_looks_as_if_it_had_been_there() -> None:
    changed = edit_config(TWO_SPACES, "quantization_config", QUANTIZATION)
    assert changed.startswith(TWO_SPACES.removesuffix(b"\n}\n") + b",\n")
    parsed = json.loads(changed)
    assert changed.endswith(b"\n}\n")
    member = json.dumps({"quantization_config": QUANTIZATION}, indent=2)
    assert changed == TWO_SPACES.removesuffix(b"\n}\n") + b"," + member.removeprefix("{").encode() + b"\n"
    assert parsed["quantization_config"] == QUANTIZATION


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{}", b'{"k": [1, {}]}'),
        (b'{"a":1}', b'{"a":1,"k":[1,{}]}'),
        (b'{"a": 1}', b'{"a": 1, "k": [1, {}]}'),
        (b'{"a": 1, "b": NaN}', b'{"a": 1, "b": NaN, "k": [1, {}]}'),
        (b'{\n    "a": Infinity\n}', b'{\n    "a": Infinity,\n    "k": [\n        1,\n        {}\n    ]\n}'),
        (b'{\r\n\t"a": 1\r\n}\r\n', b'{\r\n\t"a": 1,\r\n\t"k": [\r\n\t\t1,\r\n\t\t{}\r\n\t]\r\n}\r\n'),
        (b'\xef\xbb\xbf{\n "a": 1\n}', b'\xef\xbb\xbf{\n "a": 1,\n "k": [\n  1,\n  {}\n ]\n}'),
        (b'{"k": 7, "a": 1}', b'{"k": [1, {}], "a": 1}'),
        (b'{"a": {"k": 2}, "k": "}"}', b'{"a": {"k": 2}, "k": [1, {}]}'),
        ('{"ä\\u00e4": "\\ud83d"}'.encode(), '{"ä\\u00e4": "\\ud83d", "k": [1, {}]}'.encode()),
    ],
)
def test_style_is_kept(before, after) -> None:
    assert edit_config(before, "k", [1, {}]) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"k": 1}', b"{}"),
        (b'{"k": 1, "a": 2}', b'{"a": 2}'),
        (b'{"a": 2, "k": 1}', b'{"a": 2}'),
        (b'{"a": 2, "k": 1, "b": 3}', b'{"a": 2, "b": 3}'),
        (b'{"a": 2}', b'{"a": 2}'),
        (b'{\n  "a": 2,\n  "k": {\n    "k": 3\n  }\n}\n', b'{\n  "a": 2\n}\n'),
        (b'{\n  "k": 3,\n  "a": 2\n}\n', b'{\n  "a": 2\n}\n'),
    ],
)
def test_removal(before, after) -> None:
    assert edit_config(before, "k") == after


@given(
    config=st.dictionaries(st.text(), json_values, max_size=5),
    key=st.text(),
    value=json_values,
    indent=st.sampled_from([None, 1, 2, 4, "\t"]),
    escape=st.booleans(),
)
def test_only_the_one_key_changes(config, key, value, indent, escape) -> None:
    try:
        text = json.dumps(config, indent=indent, ensure_ascii=escape).encode()
    except UnicodeEncodeError:
        return
    changed = edit_config(text, key, value)
    assert json.loads(changed) == config | {key: value}
    without = edit_config(text, key)
    assert json.loads(without) == {k: v for k, v in config.items() if k != key}
    if key not in config:
        assert without == text
        if config:
            assert edit_config(changed, key) == text
    elif list(config)[-1] == key and len(config) > 1:
        assert changed.startswith(without.rstrip(b"\n\t }"))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b'{"a": 1',
        b'{"a": 1,}',
        b'{"a" 1}',
        b"{a: 1}",
        b'{"a": 1} x',
        b"\xff\xfe{}",
        b'{"a": tru}',
        b"{,}",
    ],
)
def test_what_is_no_object_is_refused(bad) -> None:
    with pytest.raises(CheckpointError, match="not a JSON object"):
        edit_config(bad, "k", 1)


def test_deep_nesting_and_double_keys_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not a JSON object"):
        edit_config(b'{"a": ' + b"[" * 200_000, "k", 1)
    with pytest.raises(CheckpointError, match="'k' 2 times"):
        edit_config(b'{"k": 1, "k": 2}', "k", 1)
