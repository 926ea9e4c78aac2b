"""A toy Llama quantized by narrowcast, run by transformers with compressed-tensors and by ``Running``, in float32.

Weight-only schemes: the same bits. W8A8: layer by layer, on the very input that transformers' layer got, quantized as
that library does it and not as an engine does (``runtime.engine``). Both decode the same codes; transformers
multiplies fl(c·s) of both and sums K products, we sum codes and fold scales. Each lies within γ_n · Σ|x||w| of the
exact sum of decoded operands, n = K + 5 (``test_product``), so they lie within twice that of each other; in float32
nothing is narrowed after it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import toys
from transformers import AutoModelForCausalLM

from narrowcast import api
from narrowcast.kernels.reference.gemm import bound
from narrowcast.runtime.inputs import Inputs
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.walk import Running

IDS = (torch.arange(48) * 37) % 64


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.llama(tmp_path_factory.mktemp("parent") / "model", dtype="fp32")


def quantized_toy(parent: Path, out: Path, preset: str) -> Path:
    api.quantize(parent, out, preset, container="compressed-tensors")
    return out


def transformers_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("preset", ["w4a16", "w8a16"])
def test_weight_only_logits_are_the_same_bits(parent: Path, tmp_path: Path, preset: str) -> None:
    model = quantized_toy(parent, tmp_path / "q", preset)
    with torch.no_grad():
        theirs = transformers_model(model)(IDS[None]).logits[0]
    with Running.open(model, "float32") as run:
        state = run.begin(IDS)
        for i in range(run.depth):
            run.step(run.layer(i), i, state)
        assert torch.equal(run.logits(state), theirs)


@pytest.mark.parametrize("preset", ["int8", "fp8_dynamic", "fp8_per_tensor"])
def test_w8a8_layers_lie_within_the_bound(parent: Path, tmp_path: Path, preset: str) -> None:
    model = quantized_toy(parent, tmp_path / "q", preset)
    theirs = transformers_model(model)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(name: str) -> Any:
        return lambda module, given, out: seen.update({name: (given[0][0].clone(), out[0].clone())})

    for name, module in theirs.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        theirs(IDS[None])
    assert len(seen) == 14
    with Running.open(model, "float32") as run:
        for i in range(run.depth):
            for name, module in run.layer(i).named_modules():
                if isinstance(module, ScaledLinear):
                    x, wanted = seen[f"{i}.{name}"]
                    coded = run.weights.find(module.name).coded
                    assert coded is not None
                    assert coded.stored.linear.input is not None
                    module.inputs = Inputs(coded.stored.linear.input)
                    y = module(x)
                    wide_x, wide_w = module.operand(x).decoded().numpy(), module.weight.decoded().numpy()
                    allowed = 2 * bound(wide_x, wide_w, x.shape[-1] + 5) + x.shape[-1] * 2.0**-126
                    assert (np.abs(y.double() - wanted.double()).numpy() <= allowed).all()
                    assert not torch.equal(y, torch.zeros_like(y))
