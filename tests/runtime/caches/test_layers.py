"""Caches grow, shrink and change their order without touching what is encoded; bytes and clipped elements add up."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from narrowcast.errors import InputError, UsageError
from narrowcast.runtime.caches import MODES, CacheFactory, KVScales

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32,
}  # fmt: skip
CONFIG = LlamaConfig(**SIZES)
# Bytes of one token and head, K or V, for head sizes 64 and 128, as the engines lay pages out.
ROW_BYTES = {
    "fp8_e4m3": (64, 128), "fp8_e5m2": (64, 128), "fp8_head": (64, 128), "fp8_per_token_head": (68, 132),
    "int8_per_token_head": (68, 132), "int4_per_token_head": (36, 68), "nvfp4": (36, 72), "mxfp8": (66, 132),
    "fp4_mx_block16": (36, 72),
}  # fmt: skip


def tokens(count: int, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(batch, 2, count, 64, generator=generator).to(dtype)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("keep", [(0, 0), (3, 0), (0, 4), (3, 4)])
def test_tokens_one_by_one_and_all_at_once_are_the_same(mode: str | None, keep: tuple[int, int]) -> None:
    k, v = tokens(20), tokens(21)[:, :, :20]
    whole, single, parts = (
        CacheFactory(CONFIG, mode, keep_first=keep[0], keep_last=keep[1])() for _ in range(3)
    )
    whole.update(k, v, 0)
    for i in range(20):
        single.update(k[:, :, i : i + 1], v[:, :, i : i + 1], 0)
    for start, end in ((0, 2), (2, 9), (9, 20)):
        parts.update(k[:, :, start:end], v[:, :, start:end], 0)
    for cache in (single, parts):
        assert torch.equal(cache.layers[0].keys, whole.layers[0].keys)
        assert torch.equal(cache.layers[0].values, whole.layers[0].values)
        assert cache.nbytes == whole.nbytes
    first, last = keep
    assert torch.equal(whole.layers[0].keys[:, :, :first], k[:, :, :first])
    assert torch.equal(whole.layers[0].keys[:, :, 20 - last :], k[:, :, 20 - last :])


def test_a_cache_without_a_mode_gives_back_what_it_was_given() -> None:
    k, v = tokens(5), tokens(6)[:, :, :5]
    keys, values = CacheFactory(CONFIG, None)().update(k, v, 1)
    assert torch.equal(keys.view(torch.int16), k.view(torch.int16))
    assert torch.equal(values.view(torch.int16), v.view(torch.int16))


@pytest.mark.parametrize("mode", list(MODES))
def test_bytes_are_exact(mode: str) -> None:
    assert (MODES[mode].row_bytes(64), MODES[mode].row_bytes(128)) == ROW_BYTES[mode]
    make = CacheFactory(CONFIG, mode, skip_layers=[1], keep_first=2, keep_last=3)
    cache = make()
    for layer in range(2):
        cache.update(tokens(11), tokens(11), layer)
    row = ROW_BYTES[mode][0]
    wide = 2 * 64  # bf16
    # batch 2, K and V, 2 heads; six of eleven tokens are encoded in layer 0, none in layer 1
    assert cache.nbytes == 2 * 2 * 2 * (6 * row + 5 * wide) + 2 * 2 * 2 * 11 * wide
    assert cache.nbytes == sum(
        part.untyped_storage().nbytes()
        for layer in cache.coded
        for side in (layer.k, layer.v)
        for part in side.parts
    )
    assert make.bytes_per_token == 2 * 2 * row + 2 * 2 * wide
    assert {part.dtype for part in cache.layers[1].k.parts} == {torch.bfloat16}


@pytest.mark.parametrize("mode", [None, *MODES])
def test_tokens_are_taken_back(mode: str | None) -> None:
    cache, fresh = (CacheFactory(CONFIG, mode, keep_first=1)() for _ in range(2))
    x = tokens(12)
    cache.update(x, x, 0)
    cache.crop(-5)
    assert cache.get_seq_length() == 7
    fresh.update(x[:, :, :7], x[:, :, :7], 0)
    assert torch.equal(cache.layers[0].keys, fresh.layers[0].keys)
    cache.crop(-7)
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys is None
    cache.update(x, x, 0)
    cache.reset()
    assert cache.nbytes == 0
    assert cache.get_mask_sizes(3, 0) == (3, 0)


def test_what_left_the_window_stays_encoded_when_tokens_are_taken_back() -> None:
    cache = CacheFactory(CONFIG, "fp8_e4m3", keep_last=4)()
    x = tokens(10)
    cache.update(x, x, 0)
    cache.crop(-3)
    layer = cache.layers[0].k
    assert [part.shape[-2] for part in layer.parts] == [6, 1]
    assert torch.equal(cache.layers[0].keys[:, :, 6:], x[:, :, 6:7])


@pytest.mark.parametrize("mode", [None, *MODES])
def test_batches_change_their_order(mode: str | None) -> None:
    cache = CacheFactory(CONFIG, mode, keep_first=1, keep_last=1)()
    x = tokens(6, batch=3)
    cache.update(x, x, 0)
    before = cache.layers[0].keys
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.layers[0].keys, before[[2, 0, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].values, before[[2, 2, 0, 0, 0, 0]])


def test_clipped_elements_are_counted_by_layer_and_side() -> None:
    make = CacheFactory(CONFIG, "fp8_e4m3", KVScales(k={1: np.float32([0.5])}, v={1: np.float32([4.0])}))
    x = torch.zeros(1, 2, 3, 64)
    x[0, 0, 0, :5] = torch.tensor([448.0, 449.0, -464.0, 1000.0, -2.0])
    for _ in range(2):  # two caches, one count
        cache = make()
        cache.update(x, -x, 0)
        cache.update(x, x, 1)
    assert (make.seen[0].k.elements, make.seen[0].k.clipped) == (2 * x.numel(), 6)
    assert make.seen[0].v.share == 3 / x.numel()
    assert make.seen[1].k.clipped == 2 * 4
    assert make.seen[1].v.clipped == 0


def test_nvfp4_clips_beyond_2688_global_scales() -> None:
    make = CacheFactory(CONFIG, "nvfp4", KVScales(k={0: np.float32([0.25])}))
    x = torch.full((1, 2, 1, 64), 2688.0 * 0.25)
    x[..., 16:18] *= 1.01
    keys, values = make().update(x, x, 0)
    assert make.seen[0].k.clipped == 4
    assert make.seen[0].v.clipped == 0
    assert torch.equal(keys, torch.full_like(x, 672.0))
    assert float(values[0, 0, 0, 0]) == 672.0  # at unity: 112 · 6, and 112 is an E4M3 number


def test_scales_are_those_of_the_layer_and_unity_where_there_is_none() -> None:
    scales = KVScales(k={0: np.float32([0.1, 0.2])}, v={0: np.float32([0.3])}, q={1: np.float32([0.7])})
    layers = CacheFactory(CONFIG, "fp8_head", scales)().layers
    assert layers[0].k.codec.scale.tolist() == pytest.approx([0.1, 0.2])
    assert layers[0].v.codec.scale.tolist() == pytest.approx([0.3])
    assert layers[0].q_scale is layers[0].q_scale
    assert torch.equal(layers[0].q_scale, layers[0].k.codec.scale)  # vLLM's default
    assert layers[1].q_scale.tolist() == pytest.approx([0.7])
    assert layers[1].k.codec.scale.tolist() == [1.0]


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_nothing_can_be_divided_by_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="v_scale of layer 1"):
        CacheFactory(CONFIG, "fp8_e4m3", KVScales(v={1: np.float32([bad])}))


def test_scales_of_heads_need_the_mode_of_heads() -> None:
    with pytest.raises(UsageError, match="fp8_head"):
        CacheFactory(CONFIG, "fp8_e4m3", KVScales(k={0: np.float32([1, 2])}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "fp7"}, "fp8_e4m3, fp8_e5m2"),
        ({"mode": "fp8_e4m3", "skip_layers": [2]}, "0 to 1, or sliding_window"),
        ({"mode": "fp8_e4m3", "skip_layers": ["sliding"]}, "sliding"),
        ({"mode": "fp8_e4m3", "keep_last": -1}, "-1"),
    ],
)
def test_what_there_is_not_is_refused(arguments: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CacheFactory(CONFIG, **arguments)()


def test_sliding_layers_can_be_kept_wide_by_their_kind() -> None:
    config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    cache = CacheFactory(config, "int4_per_token_head", skip_layers=["sliding_window"])()
    assert [layer.k.mode is None for layer in cache.layers] == [True, False]


def test_the_page_says_what_the_modes_take() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kv_cache.md").read_text()
    said = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) == 8}
    assert [name for name in said if name in MODES] == list(MODES)
    for name, mode in MODES.items():
        assert [int(cell) for cell in said[name][4:6]] == [mode.row_bytes(64), mode.row_bytes(128)]
        assert said[name][6].strip().replace("`", "") == "; ".join(mode.engines)
