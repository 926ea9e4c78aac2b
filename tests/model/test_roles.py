"""Roles by name: a corpus of real names, and every alternative of every row of the table is used by one."""

from __future__ import annotations

import re

import pytest

from model.names_corpus import CASES, Case, Tensor, config, entries
from narrowcast.model.modules import modules
from narrowcast.model.roles import FUNCTIONS, PLACES, Role, Row, classify, find_function, find_place, stem

# kind, read by a kernel, has a problem
KINDS = {
    "L": ("Linear", False, False),
    "E": ("Embedding", False, False),
    "K": ("Linear", True, False),
    "P": ("Linear", False, True),
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family}:{c.name}")
def test_corpus(case: Case) -> None:
    assert classify(case.name, case.shape, case.config) == case.role
    found = {m.tensor: m for m in modules(entries(case.family), case.config)}
    if case.kind == "-":
        assert case.name not in found
    else:
        module = found[case.name]
        assert module.role == case.role
        assert (module.kind, module.direct, module.problem is not None) == KINDS[case.kind]
        assert module.known


def alternatives(pattern: str) -> list[str]:
    """The top-level alternatives of a regular expression."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(pattern):
        escaped = i > 0 and pattern[i - 1] == "\\"
        depth += (char in "([") - (char in ")]") if not escaped else 0
        if char == "|" and depth == 0:
            parts.append(pattern[start:i])
            start = i + 1
    return [*parts, pattern[start:]]


ALTERNATIVES = [(row, part) for row in (*PLACES, *FUNCTIONS) for part in alternatives(row.pattern)]


@pytest.mark.parametrize(("row", "part"), ALTERNATIVES, ids=lambda x: x if isinstance(x, str) else x.role)
def test_every_alternative_is_used(row: Row, part: str) -> None:
    """No dead entries: some name of the corpus is read by this alternative of this row."""
    end = r"(?:\.|$)" if row in PLACES else "$"
    one = re.compile(rf"(?:^|.*\.)(?:{part}){end}")
    for case in CASES:
        path = case.name if row in PLACES else stem(case.name)
        chosen = find_place(case.name, case.config) if row in PLACES else find_function(case.name)
        if chosen is row and one.match(path):
            return
    pytest.fail(f"no name of the corpus uses {part!r} of {row.role}: {row.note}")


def test_a_role_is_its_name() -> None:
    assert Role.ROUTER == "router"
    assert Role.ROUTER in frozenset({"router"})


def test_unknown_names_are_reported_not_guessed() -> None:
    tensors = {n: Tensor(n, (64, 64)) for n in ("blocks.0.zorp.weight", "blocks.0.zorp.state")}
    (module,) = modules(tensors, {})
    assert (module.name, module.role, module.linear, module.known) == ("blocks.0.zorp", "other", True, False)
    assert classify("blocks.0.zorp.state", (64, 64), {}) == "other"


def test_mtp_layers_need_the_config_to_be_told_by_number() -> None:
    name = "model.layers.61.mlp.down_proj.weight"
    said = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    assert classify(name, (1, 1), said) == "mtp"
    assert classify(name, (1, 1), {"text_config": said}) == "mtp"
    assert classify(name, (1, 1), {"num_hidden_layers": 61}) == "mlp"
    assert classify("model.layers.60.mlp.down_proj.weight", (1, 1), said) == "mlp"


def test_a_router_is_not_a_gate_projection() -> None:
    """Field case 12: .mlp.gate is the router, .mlp.gate_proj is not."""
    assert classify("model.layers.0.mlp.gate.weight", (8, 64), {}) == "router"
    assert classify("model.layers.0.mlp.gate_proj.weight", (8, 64), {}) == "mlp"


def test_biases_are_found_with_their_matrix() -> None:
    by_name = {m.name: m for m in modules(entries("gpt-oss-20b-bf16"), config("gpt-oss-20b-bf16"))}
    assert by_name["model.layers.0.self_attn.q_proj"].bias == "model.layers.0.self_attn.q_proj.bias"
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert by_name[experts].bias == f"{experts}_bias"
