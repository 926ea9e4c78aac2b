"""A checkpoint of every family that transformers writes, against what its config alone says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.geometry_toys import TOWERS, TOYS
from narrowcast.serving.loading import load
from narrowcast.serving.served import TOWERS as BESIDE
from narrowcast.serving.served import Served

# Of a whole checkpoint: parameters that families hold as buffers lie in the files alone.
FAMILIES = [*TOYS, *TOWERS]


def build(family: str, fields: dict[str, Any]) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(family, **json.loads(json.dumps(fields)))
    kinds = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    for kind in kinds if "vision_config" not in fields else kinds[::-1]:
        if type(config) in kind._model_mapping:
            return kind.from_config(config)
    return transformers.MllamaForCausalLM(config)


def matrices(served: Served) -> Counter[tuple[Any, ...]]:
    """Layers by what a plan looks at; kinds of layers that differ in nothing else count together."""
    found: Counter[tuple[Any, ...]] = Counter()
    for group in served.groups:
        m = group.matrix
        if m.role not in BESIDE:
            each = group.nbytes // m.layers
            found[m.name, m.role, m.shape, m.experts, m.active, m.split, m.heads, m.bias, m.pieces, each] += (
                m.layers
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"), FAMILIES, ids=[f"{i}-{family}" for i, (family, _) in enumerate(FAMILIES)]
)
def test_files_and_config_say_the_same(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    build(family, fields).to(torch.bfloat16).save_pretrained(tmp_path)
    files, config = load(tmp_path), load(tmp_path / "config.json")
    assert matrices(files) == matrices(config)
    assert not [note for note in files.notes if "parameters" in note]
    # A router's correction, a scalar of each layer or two: at most as many numbers as there are experts.
    buffers = (files.vector_bytes - config.vector_bytes) // 2
    assert 0 <= buffers <= config.geometry.layers * max(config.geometry.experts, 2)
