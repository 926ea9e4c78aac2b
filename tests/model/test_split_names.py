"""How a matrix is split, by its name alone, against what families say of theirs."""

from __future__ import annotations

from typing import Any

import pytest

from narrowcast.model.families import geometry
from narrowcast.model.geometry import split_of
from serving import configs

CONFIGS = {name: value for name, value in vars(configs).items() if name.isupper() and "model_type" in value}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_names_say_what_families_say(config: dict[str, Any]) -> None:
    for matrix in geometry(config).matrices:
        assert (split_of(matrix.name) or "whole") == matrix.split, matrix.name


def test_names_without_a_family() -> None:
    found = {
        name: split_of(f"model.layers.0.x.{name}") for name in ("c_fc", "dense_4h_to_h", "kv_a_proj_with_mqa")
    }
    assert found == {"c_fc": "column", "dense_4h_to_h": "row", "kv_a_proj_with_mqa": "whole"}
    assert split_of("model.layers.0.router.weights_of_its_own") is None
