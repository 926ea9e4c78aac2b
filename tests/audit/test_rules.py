"""Every rule fires on its case, stays silent on the case beside it, and says in its docstring what people need."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from audit.asking import Ask, Case
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import FAMILIES, SECTIONS, rules
from narrowcast.audit.run import audit


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for family in FAMILIES.values():
        here = Path(__file__).parent / "cases"
        for file in sorted(here.glob(f"{family}*.py")):
            found |= import_module(f"audit.cases.{file.stem}").CASES
    return found


CASES = cases()


def findings(ask: Ask, code: str) -> list[Finding]:
    done = audit(ask.model, select=[code], **ask.options)
    assert [rule.code for rule in done.ran] == [code], f"{code} did not run: {done.skipped}"
    return [one for one in done.findings if one.rule == code]


@pytest.mark.parametrize("code", rules())
def test_fires(code: str, tmp_path: Path) -> None:
    assert code in CASES, f"{code} has no case"
    ask = CASES[code].fires(tmp_path)
    found = findings(ask, code)
    assert found, f"{code} is silent on its firing case"
    for key, wanted in ask.expect.items():
        assert getattr(found[0], key) == wanted, f"{key}: {found[0]}"
    assert all(one.said and len(one.said) < 200 for one in found)


@pytest.mark.parametrize("code", rules())
def test_silent(code: str, tmp_path: Path) -> None:
    assert findings(CASES[code].silent(tmp_path), code) == []


@pytest.mark.parametrize("code", rules())
def test_documented(code: str) -> None:
    """Title, what, why, fix and false alarms, in this order."""
    rule = rules()[code]
    assert rule.title
    assert len(rule.title) < 90
    places = [rule.text.find(f"\n{section}") for section in SECTIONS]
    assert -1 not in places, f"{code} lacks {SECTIONS[places.index(-1)]}"
    assert places == sorted(places)


def test_names_are_of_one_rule() -> None:
    """A rule is silenced by its name as well."""
    assert len({rule.name for rule in rules().values()}) == len(rules())


def test_no_case_without_rule() -> None:
    assert set(CASES) == set(rules())


def test_the_parent_by_its_headers(tmp_path: Path) -> None:
    """A quick audit beside the parent still says which tensors are gone."""
    ask = CASES["NC450"].fires(tmp_path)
    done = audit(ask.model, quick=True, **ask.options)
    assert "NC450" in {one.rule for one in done.findings}
    assert done.subject.depth == "scales"


def test_one_rule_that_reads_nothing() -> None:
    """What a report counts is there once the files are closed, whatever the rules looked at."""
    model = Path(__file__).parents[1] / "containers" / "upstream" / "compressed_tensors_fp8_kv"
    assert audit(model, select=["NC612"], workers=1).subject.held
