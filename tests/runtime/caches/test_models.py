"""Caches under transformers' own models: teacher-forced, token by token, generating, with windows and soft caps."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from narrowcast.errors import UsageError
from narrowcast.runtime.attend import P_SCALES, attend_in
from narrowcast.runtime.caches import MODES, CacheFactory, KVScales

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 32, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "gemma2": Gemma2Config(**SIZES, sliding_window=8),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=TYPES),
    "gpt_oss": GptOssConfig(**SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
}
TOKENS = 20
# Float64 keeps BLAS' order of sums out of sight: a code that rounds differently moves logits by far more than this.
# Where transformers has only its plain attention, the softmax is in fp32, and sums of different lengths differ by it.
CLOSE = dict.fromkeys(CONFIGS, 2.0**-40) | {"gemma2": 2.0**-20, "gpt_oss": 2.0**-20}


def model_of(config: PreTrainedConfig, attention: str | None = None) -> torch.nn.Module:
    torch.manual_seed(3)
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"  # the grouped product knows no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    if attention is not None:
        attend_in(model, attention)
    return model


def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def forced(model: torch.nn.Module, cache: object) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids(), cache=cache, use_cache=True).logits


def stepped(model: torch.nn.Module, cache: object) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(
            [model(ids()[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(TOKENS)], 1
        )


@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_cache_without_a_mode_changes_no_bit(family: str) -> None:
    model = model_of(CONFIGS[family])
    with torch.inference_mode():
        plain = model(ids(), use_cache=False).logits
    assert torch.equal(forced(model, CacheFactory(model.config, None)()), plain)


@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", mode) for mode in (None, *MODES)]
    + [(family, mode) for family in list(CONFIGS)[1:] for mode in (None, "fp8_e4m3", "int4_per_token_head")],
)
def test_token_by_token_and_teacher_forced_agree(family: str, mode: str | None) -> None:
    model = model_of(CONFIGS[family])
    make = CacheFactory(model.config, mode)
    at_once = forced(model, make())
    torch.testing.assert_close(stepped(model, make()), at_once, rtol=0, atol=CLOSE[family])
    if mode is not None:
        assert float((at_once - forced(model, CacheFactory(model.config, None)())).abs().max()) > 1e-6


@pytest.mark.parametrize("family", list(CONFIGS))
def test_generation_with_windows_and_beams(family: str) -> None:
    model = model_of(CONFIGS[family])
    how = {"max_new_tokens": 10, "do_sample": False}
    for more in ({}, {"num_beams": 3}):
        plain = model.generate(ids(), **how, **more)
        cache = CacheFactory(model.config, None)()
        assert torch.equal(model.generate(ids(), cache=cache, **how, **more), plain)
        assert cache.get_seq_length() == TOKENS + 9
        for mode in ("fp8_e4m3", "int4_per_token_head"):
            cache = CacheFactory(model.config, mode)()
            out = model.generate(ids(), cache=cache, **how, **more)
            assert out.shape == plain.shape
            # What was generated is what the model would say to it, teacher-forced under the same cache.
            if not more:
                with torch.inference_mode():
                    said = model(out, cache=CacheFactory(model.config, mode)(), use_cache=True).logits
                assert torch.equal(said[:, TOKENS - 1 : -1].argmax(-1), out[:, TOKENS:])


@pytest.mark.parametrize("attention", list(P_SCALES))
@pytest.mark.parametrize("family", list(CONFIGS))
def test_fp8_attention_runs_in_every_family(family: str, attention: str) -> None:
    model, plain = model_of(CONFIGS[family], attention), model_of(CONFIGS[family], "eager")
    small = {layer: np.float32([0.01]) for layer in range(2)}
    make = CacheFactory(model.config, "fp8_e4m3", KVScales(small, small, small))
    at_once = forced(model, make())
    assert (
        float((at_once - forced(plain, make())).abs().max()) > 1e-6
    )  # queries and probabilities are rounded too
    # Attention runs in fp32; a probability at a tie could turn by a code, and shows none here.
    torch.testing.assert_close(stepped(model, make()), at_once, rtol=0, atol=2.0**-20)
    model.generate(ids(), cache=make(), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_layers_that_stay_wide_attend_as_transformers_does(family: str) -> None:
    """Masks, windows, soft caps and sinks of the FP8 function, without its roundings, beside the eager one. Attention
    runs in fp32 here: sums of 32 products and 20 weights, through two layers and norms of condition about 1."""
    model, plain = model_of(CONFIGS[family], "fp8"), model_of(CONFIGS[family], "eager")
    found = forced(model, CacheFactory(model.config, "fp8_e4m3", skip_layers=range(2))())
    want = forced(plain, CacheFactory(model.config, None)())
    assert float((found - want).abs().max()) <= 2 * (32 + TOKENS + 8) * 2.0**-24 * float(want.abs().max())


def test_fp8_attention_refuses_what_holds_no_codes() -> None:
    model = model_of(CONFIGS["llama"], "fp8")
    with pytest.raises(UsageError, match="do not come straight from a cache"):
        model(ids(), use_cache=False)
    for cache in (
        CacheFactory(model.config, "fp8_e5m2")(),
        CacheFactory(model.config, "int8_per_token_head")(),
        CacheFactory(model.config, "fp8_e4m3", keep_first=1)(),
    ):
        with pytest.raises(UsageError, match="hold others"):
            forced(model, cache)


def test_an_attention_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="fp8, fp8_p448"):
        model_of(CONFIGS["llama"], "fp7")
