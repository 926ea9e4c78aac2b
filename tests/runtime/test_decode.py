"""Generation from packed weights: layers, whole models, and what they hold in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import toys
from tests.runtime.families import saved

from narrowcast import api
from narrowcast.errors import UsageError
from narrowcast.kernels.reference import matvec as reference
from narrowcast.kernels.reference.gemm import bound
from narrowcast.numbers.formats import FP32
from narrowcast.runtime import decode
from narrowcast.runtime.decode import PackedLinear, pack, packed
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.walk import Running
from narrowcast.tensors.schemes import schemes


def layer_of(name: str, n: int, k: int, **more: Any) -> PackedLinear:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).numpy()
    return PackedLinear("layer", pack(w, FP32, schemes[name]), **more)


@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows_are_the_definition_with_one_cast_at_the_end(name: str, dtype: torch.dtype) -> None:
    bias = torch.randn(37)
    layer = layer_of(name, 37, 130, bias=bias)
    x = torch.randn(2, 3, 130).to(dtype)
    weight = layer.weight
    sums = reference.matvec(
        x.reshape(6, 130).float().numpy(), weight.rows, weight.scheme, weight.packing, weight.outer
    )
    wanted = (torch.from_numpy(sums) + bias).to(dtype).reshape(2, 3, 37)
    got = layer(x)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)


def test_many_rows_are_the_decoded_weight_in_blas() -> None:
    for name in ("fp8_block128", "int4_g32", "nvfp4"):
        layer = layer_of(name, 300, 160)
        x = torch.randn(20, 160)
        whole = layer.weight.decoded(0, 300)
        got, exact = layer(x), x.double() @ whole.double().T
        allowed = 160 * 2.0**-24 / (1 - 160 * 2.0**-24) * (x.abs().double() @ whole.abs().double().T)
        assert bool(((got.double() - exact).abs() <= allowed).all())


def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "ALONE", 0)
    x = torch.randn(3, 192)
    alone, together = (layer_of("int8_g32", 101, 192, threads=count) for count in (1, 3))
    assert torch.equal(alone(x), together(x))


def test_a_layer_holds_its_codes_and_no_decoded_copy() -> None:
    layer = layer_of("int4_g128", 256, 1024)
    assert layer.nbytes <= 256 * 1024 // 2 + 2 * 256 * 8 + 4 * 256 + 64
    assert not list(layer.parameters())
    assert not list(layer.buffers())


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    root = tmp_path_factory.mktemp("toy")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root)
    return root


def test_a_plain_model_quantized_while_loading_generates_what_its_decoded_weights_do(toy: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, weights = packed(toy, "int8_channel", "float32")
    assert weights.reasons == {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 2 * 7
    plain = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data = layer.weight.decoded(0, layer.out_features)
    ids = torch.tensor([[5, 17, 42]])
    how: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


def test_the_head_stays_in_the_memory_of_the_embedding_or_is_packed_too(toy: Path) -> None:
    model, _ = packed(toy, "fp8_channel")
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.lm_head.weight.dtype == torch.bfloat16
    model, _ = packed(toy, "fp8_channel", head=True)
    assert isinstance(model.lm_head, PackedLinear)
    assert model(torch.tensor([[1, 2]])).logits.isfinite().all()


def test_a_quantized_checkpoint_keeps_its_codes_and_a_plain_one_needs_a_scheme(
    toy: Path, tmp_path: Path
) -> None:
    from narrowcast.cli import main

    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", "w4a16", "--json"]) == 0
    model, weights = packed(tmp_path / "q")
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 14
    assert weights.reasons == {}
    assert {layer.weight.scheme.element.name for layer in layers} == {"int4"}
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    with pytest.raises(UsageError, match="not quantized"):
        packed(toy)
    with pytest.raises(UsageError, match="unknown scheme"):
        packed(toy, "fp7")


@pytest.mark.parametrize("preset", ["fp8_dynamic", "fp8_per_tensor", "fp8_block", "int8", "w4afp8", "mxfp8"])
def test_layers_with_quantized_inputs_compute_what_the_walk_computes(
    toy: Path, tmp_path: Path, preset: str
) -> None:
    """Both add the same K products under two scales in an order of their own: twice the bound apart, at most."""
    from narrowcast.cli import main

    assert main(["quantize", str(toy), str(tmp_path / "q"), "--preset", preset, "--json"]) == 0
    assert_alike(tmp_path / "q")


def test_stacked_experts_that_are_stored_transposed_stay_packed(tmp_path: Path) -> None:
    api.quantize(saved("gpt-oss", tmp_path / "parent", torch.bfloat16), tmp_path / "q", "mxfp4a16")
    assert_alike(tmp_path / "q")


def test_plain_layers_that_are_stored_transposed(tmp_path: Path) -> None:
    """GPT-2's. Quantized to INT8 every weight lies within half a step, s/2, of its own, after one rounding of 2^-24."""
    model = saved("gpt2-learned-positions", tmp_path)
    with Running.open(model, "float32") as run:
        plain = {
            module.name: module for module in run.resident().modules() if isinstance(module, ScaledLinear)
        }
    whole, _ = packed(model, "int8_channel", "float32")
    layers = [module for module in whole.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 4 * 4
    for layer in layers:
        wide = plain[layer.name].weight.matrix
        step = wide.abs().amax(1, keepdim=True) / 127
        assert ((layer.weight.decoded(0, layer.out_features) - wide).abs() <= step * (0.5 + 2.0**-16)).all()
    with torch.no_grad():
        assert whole(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_shuffled_columns_are_decoded_in_their_order(tmp_path: Path) -> None:
    parent, made = toys.llama(tmp_path / "parent", hidden=256, inner=384), tmp_path / "q"
    api.quantize(parent, made, "w4a16", container="gptq")
    tensors = load_file(made / "model.safetensors")
    for name, one in tensors.items():
        if name.endswith("g_idx"):
            tensors[name] = one[torch.randperm(len(one), generator=torch.Generator().manual_seed(1))]
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    for file in ("config.json", "quantize_config.json"):
        said = json.loads((made / file).read_text())
        said.get("quantization_config", said)["desc_act"] = True
        (made / file).write_text(json.dumps(said))
    with Running.open(made) as run:
        order, _ = run.weights.find("model.layers.0.self_attn.q_proj").columns()
        assert order is not None
        assert sorted(order) != list(order)
    assert_alike(made)


def assert_alike(model: Path) -> None:
    """Every linear of a packed model beside the walk's, for a few rows and for many, in float32."""
    whole, _ = packed(model, dtype="float32")
    with Running.open(model, "float32") as run:
        for i in range(run.depth):
            for name, linear in run.layer(i).named_modules():
                if not isinstance(linear, ScaledLinear):
                    continue
                other = whole.get_submodule(f"{run.path}.{i}.{name}")
                for rows in (1, 12):
                    x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(rows))
                    wide, weight = linear.operand(x).decoded().numpy(), linear.weight.decoded().numpy()
                    allowed = 2 * bound(wide, weight, linear.in_features + 5)
                    assert (np.abs((other(x) - linear(x)).double().numpy()) <= allowed).all()
