"""The rows and the attention of vLLM's own kernels, as vllm_kernels.py executed them, against ours."""

import json
from pathlib import Path

import pytest
import torch

from narrowcast.runtime.attend import P_SCALES, Attention
from narrowcast.runtime.caches import MODES
from narrowcast.runtime.caches.layer import CodedLayer, Seen, Side
from narrowcast.runtime.caches.rotated import rotate

FOUND = json.loads(Path(__file__).with_name("vllm_kernels.json").read_text())
TOKENS = 5


def tensor(said: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(said), dtype=dtype).reshape(shape)


@pytest.mark.parametrize("case", FOUND["rows"], ids=lambda c: f"{c['mode']}-{c['dim']}-{c['dtype']}")
def test_rows_are_those_of_the_kernels(case: dict) -> None:
    dim = case["dim"]
    x = tensor(case["x"], getattr(torch, case["dtype"]), TOKENS, 2, dim)
    rows, _ = MODES[case["mode"]].codec(torch.ones(1)).encode(x)
    width = rows.shape[-1] - 4
    codes = tensor(case["codes"], torch.uint8, TOKENS, 2, width)
    scales = tensor(case["scales"], torch.uint8, TOKENS, 2, 4)
    assert torch.equal(rows[..., width:], scales)
    assert torch.equal(rows[..., :width], codes)


@pytest.mark.parametrize("case", FOUND["rotations"], ids=lambda c: str(c["dim"]))
def test_rotations_are_vllms_bit_for_bit(case: dict) -> None:
    x = ((torch.arange(3 * case["dim"]) * 37 % 101 - 50) / 16).reshape(3, case["dim"])
    assert torch.equal(rotate(x), tensor(case["rotated"], torch.float32, 3, case["dim"]))


@pytest.mark.parametrize("case", FOUND["attention"], ids=lambda c: f"{c['mode']}-{c.get('softcap', 0)}")
def test_attention_is_that_of_the_kernels(case: dict) -> None:
    """INT4 is the proof that turning K and V back equals vLLM's turning of queries and outputs, FP8 that of the scale
    of probabilities: a code that rounded otherwise would be off by 2^-4 of its weight."""
    q, k, v = (
        tensor(case[name], torch.float32, TOKENS, heads, 16).transpose(0, 1)[None]
        for name, heads in zip("qkv", (4, 2, 2), strict=True)
    )
    q_scale, k_scale, v_scale = (torch.tensor([s]) for s in case.get("scales", (1.0, 1.0, 1.0)))
    mode = MODES[case["mode"]]
    layer = CodedLayer(Side(mode, k_scale, Seen()), Side(mode, v_scale, Seen()), q_scale)
    keys, values = layer.update(k, v)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    scores = q @ keys.repeat_interleave(2, 1).transpose(-1, -2) * 16**-0.5
    if "attention" in case:
        attention = Attention(P_SCALES[case["attention"]])
        out, _ = attention(torch.nn.Identity(), q, keys, values, mask, softcap=case["softcap"] or None)
    else:
        out = ((scores + mask).softmax(-1) @ values.repeat_interleave(2, 1)).transpose(1, 2)
    # Two orders of fp32 sums of 16 products, of an exponential and of 5 weights; scores turn absolute errors of
    # theirs into relative ones of weights, and those of the kernel are sums over vectors that are 4 times as long.
    roundings = 2 * (4 * 16 + 8 + TOKENS)
    bound = roundings * 2.0**-24 * (1 + float(scores.abs().max())) * float(values.abs().max())
    want = tensor(case["out"], torch.float32, TOKENS, 4, 16)
    assert float((out[0] - want).abs().max()) <= bound
    assert bound < 2.0**-6 * float(values.abs().max())
