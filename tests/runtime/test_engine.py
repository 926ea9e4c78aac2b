"""What an engine makes of a checkpoint: its own arithmetic for inputs, one scale for what it loads as one matrix."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import toys

from narrowcast import api
from narrowcast.kernels.reference.quantize import quantize as definition
from narrowcast.numbers.formats import E4M3FN
from narrowcast.runtime.engine import NVFP4, as_engine, requantized
from narrowcast.runtime.inputs import Inputs
from narrowcast.runtime.linear import Seen
from narrowcast.runtime.online import FP8_TOKEN, INT8_TOKEN
from narrowcast.runtime.quantizing import quantized
from narrowcast.runtime.walk import Running
from narrowcast.tensors.schemes import schemes

FP8 = torch.float8_e4m3fn


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """As a device stores it: saturated, to nearest even."""
    return x.clamp(-448, 448).to(FP8).view(torch.uint8)


def test_one_stored_scale_multiplies_by_its_reciprocal() -> None:
    halfway = torch.arange(17, 32, 2)[None] * torch.exp2(torch.arange(-8, 4))[:, None]
    apart = False
    for s in (0.0277099609375, 0.1, 0.0123, 0.7):
        scale = torch.tensor(s)
        x = halfway * scale
        q = quantized(x, as_engine(schemes["fp8_tensor"]), s)
        assert np.array_equal(q.codes, e4m3(x * (1 / scale)).numpy())
        apart |= not torch.equal(e4m3(x * (1 / scale)), e4m3(x / scale))
    assert apart  # from a division


@pytest.mark.parametrize("tiny", [False, True])
def test_a_token_of_fp8_has_a_floor_and_one_of_int8_spans_127(tiny: bool) -> None:
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    x[3] *= 2.0**-12 if tiny else 1
    x[4] = 0 if tiny else x[4]
    amax = x.abs().amax(1, keepdim=True)
    assert as_engine(schemes["fp8_token"]) is FP8_TOKEN
    q, s = quantized(x, FP8_TOKEN), (amax / 448).clamp(min=float(np.float32(1) / np.float32(448 * 512)))
    assert np.array_equal(q.scales[0], s.numpy())
    assert np.array_equal(q.codes, e4m3(x / s).numpy())
    assert as_engine(schemes["int8_channel"]) is INT8_TOKEN
    q = quantized(x, INT8_TOKEN)
    wanted = torch.where(amax > 0, x * (127 / amax), 0).round().to(torch.int8)
    assert np.array_equal(q.codes.view(np.int8), wanted.numpy())


def test_mx_is_the_engines_for_what_bf16_holds() -> None:
    """2^ceil(log2(amax/448)) in fp32 is the least power of two that does not clip, for every bf16 maximum."""
    amax = torch.arange(0x0180, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    x = torch.zeros(len(amax), 32)
    x[:, 5] = amax
    ours, fp32 = quantized(x, schemes["mxfp8"]), (amax / 448).log2().ceil()
    assert np.array_equal(ours.scales[0][:, 0], (fp32.clamp(min=-127) + 127).to(torch.uint8).numpy())


def test_a_block_of_nvfp4_that_rounds_to_a_scale_of_zero_is_zeros() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    x[1, 16:32] *= 2.0**-20
    g = 2688.0 / float(x.abs().max())
    q = quantized(x, NVFP4, g)
    assert (q.scales[0][1, 1], q.scales[0].min()) == (0, 0)
    assert not q.dequantize()[1, 16:32].any()
    scale = x.view(4, 4, 16).abs().amax(-1) / 6 * g
    assert np.array_equal(q.scales[0], e4m3(scale).numpy())
    slow = definition(x.numpy(), NVFP4, outer=np.full((1, 1), g, np.float32))
    assert np.array_equal(q.codes, slow.codes)
    assert np.array_equal(q.dequantize(), slow.dequantize())


def test_a_stored_divisor_clips_what_it_cannot_hold() -> None:
    seen, x = Seen(), torch.full((1, 16), 3.0)
    made = Inputs(NVFP4, 1024.0).operand(x, seen)
    assert (seen.clipped, seen.elements) == (16, 16)
    assert torch.equal(made.decoded(), torch.full((1, 16), 2688 / 1024))


@pytest.mark.parametrize(("own", "kept"), [(0.01, 0.013), (0.3, 0.3), (3e-6, 3e-6), (1e-4, 0.9)])
def test_codes_quantized_again_are_those_of_torch(own: float, kept: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~codes.view(FP8).float().isnan()]
    half = codes.view(FP8).half() * torch.tensor([own]).half()  # a scale on the device is a tensor of fp16
    wanted = e4m3(half.float() * (1 / torch.tensor(kept)))
    assert np.array_equal(requantized(own, kept)[codes.numpy()], wanted.numpy())
    assert (requantized(own, kept)[[0x7F, 0xFF]] == [0x7F, 0xFF]).all()


def fused(tmp_path: Path, dtype: torch.dtype) -> Path:
    """A Llama in FP8 per tensor with stored scales of inputs, those of q, k and v all different."""
    made = tmp_path / "q"
    api.quantize(toys.llama(tmp_path / "parent"), made, "fp8_per_tensor", container="compressed-tensors")
    tensors = load_file(made / "model.safetensors")
    for i, (name, one) in enumerate(sorted(tensors.items())):
        if name.endswith("weight_scale"):
            stem = name.removesuffix("weight_scale")
            tensors[name] = (one * (1 + 0.125 * (i % 5))).to(dtype)
            tensors[f"{stem}input_scale"] = torch.tensor([0.01 + i / 1024])
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_keep_the_largest_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    made = fused(tmp_path, dtype)
    tensors = load_file(made / "model.safetensors")
    groups = (("q_proj", "k_proj", "v_proj"), ("o_proj",)), (("gate_proj", "up_proj"), ("down_proj",))
    with Running.open(made) as run:
        layer = run.layer(1)
        assert any("one scale" in note for note in run.notes)
    for part, sets in zip(("self_attn", "mlp"), groups, strict=True):
        for members in sets:
            stems = [f"model.layers.1.{part}.{leaf}" for leaf in members]
            kept = max(float(tensors[f"{stem}.weight_scale"]) for stem in stems)
            largest = max(float(tensors[f"{stem}.input_scale"]) for stem in stems)
            for stem, leaf in zip(stems, members, strict=True):
                linear = layer.get_submodule(f"{part}.{leaf}")
                codes = tensors[f"{stem}.weight"].view(torch.uint8)
                again = requantized(float(tensors[f"{stem}.weight_scale"]), kept)[codes.numpy()]
                assert torch.equal(linear.weight.matrix, torch.from_numpy(again).view(FP8).float())
                assert float(linear.weight.scale) == np.float32(kept)
                assert linear.inputs.static == np.float32(largest)
                assert linear.inputs.scheme.element is E4M3FN
