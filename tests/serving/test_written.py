"""Presets as containers write them: what one layer's width does to the groups of the others."""

from __future__ import annotations

import pytest

from narrowcast.serving.loading import from_config
from serving.configs import LLAMA3_8B

# A down projection of 320 columns has no groups of 128, every other layer has.
NARROW = LLAMA3_8B | {
    "hidden_size": 512,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("container", "others"),
    [("compressed-tensors", 128), ("awq", 64)],  # AWQ's config has one group_size for the whole checkpoint
)
def test_groups_that_not_every_layer_divides(container: str, others: int) -> None:
    served = from_config("narrow", NARROW, preset="w4a16_asym", container=container)
    groups = {
        group.matrix.leaf: group.linear.weight.group for group in served.groups if group.linear is not None
    }
    assert groups == dict.fromkeys(groups, others) | {"down_proj": 64}
    assert set(groups) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
