"""What the table of narrow operations measures, beside transformers' own model narrowed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from narrowcast.cli import main
from narrowcast.errors import IncomparableError, UsageError
from narrowcast.runtime.narrow import CASTS, serial
from narrowcast.studies.legal import Legal, legal
from studies import calibrated_toys as calibrated
from studies import traced_toys as toys


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str, Legal]:
    """A random Llama with weights that BF16 holds, and its table."""
    folder, model = toys.llama(tmp_path_factory.mktemp("legal") / "toy")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    toys.save(folder, model)
    text = toys.text(folder)
    return folder, model, text, legal(folder, [text])


def cell(found: Legal, operation: str, dtype: str) -> Any:
    return next(one for one in found.cells if (one.operation, one.dtype) == (operation, dtype))


def divergence(a: torch.Tensor, b: torch.Tensor) -> float:
    """Σ p (log p - log q) in float64, mean over tokens."""
    p, q = torch.log_softmax(a[0].double(), 1), torch.log_softmax(b[0].double(), 1)
    return float((p.exp() * (p - q)).sum(1).mean())


def near(kl: float) -> Any:
    """A KL made from float32 log-probabilities. Below 16 in magnitude each is off by less than two units of 2^-20, a
    difference by δ < 2^-18, and Σ p (e^x - 1 - x) by Σ p |e^x - 1| δ, about sqrt(2 KL) δ."""
    return pytest.approx(kl, abs=2**-18 * (2 * kl) ** 0.5, rel=0)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Saturating cast through another library's dtype."""
    clipped = np.clip(x.detach().numpy(), -448, 448)
    return torch.from_numpy(clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def bf16(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().astype(ml_dtypes.bfloat16).astype(np.float32))


@contextmanager
def softmax_as(narrow: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """transformers' eager attention with its probabilities narrowed."""
    eager = modeling_llama.eager_attention_forward

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        _, weights = eager(module, query, key, value, mask, scaling, **rest)
        wide = modeling_llama.repeat_kv(value, module.num_key_value_groups)
        return (narrow(weights) @ wide).transpose(1, 2).contiguous(), weights

    modeling_llama.eager_attention_forward = attention
    try:
        yield
    finally:
        modeling_llama.eager_attention_forward = eager


@torch.no_grad()
def test_narrowing_by_hand_gives_the_same_divergence(made: tuple[Path, Any, str, Legal]) -> None:
    """Softmax, norm outputs, the residual stream and linear inputs, each narrowed in transformers' own model."""
    _, model, _, found = made
    ids = torch.tensor(found.tokens.pieces[0].ids)[None]
    wide = model(ids).logits
    got: dict[tuple[str, str], torch.Tensor] = {}
    with softmax_as(e4m3):
        got["softmax", "e4m3"] = model(ids).logits
    modules = dict(model.named_modules())
    sites: dict[tuple[str, str], list[Any]] = {
        ("norm output", "e4m3"): [module for name, module in modules.items() if name.endswith("norm")],
        ("linear outputs", "bf16"): [m for name, m in modules.items() if name.endswith("_proj")],
    }
    for (operation, dtype), chosen in sites.items():
        narrow = {"e4m3": e4m3, "bf16": bf16}[dtype]
        hooks = [m.register_forward_hook(lambda m, a, o, n=narrow: n(o)) for m in chosen]
        got[operation, dtype] = model(ids).logits
        for hook in hooks:
            hook.remove()
    linears = [module for name, module in modules.items() if name.endswith("_proj")]
    hooks = [m.register_forward_pre_hook(lambda m, a: (e4m3(a[0]),)) for m in linears]
    got["linear inputs", "e4m3"] = model(ids).logits
    for hook in hooks:
        hook.remove()
    for (operation, dtype), logits in got.items():
        one = cell(found, operation, dtype)
        assert one.kl > 0
        assert one.kl == near(divergence(wide, logits)), (operation, dtype)
        assert one.top1 == float((wide.argmax(-1) == logits.argmax(-1)).double().mean())


@torch.no_grad()
def test_weights_narrowed_by_hand(made: tuple[Path, Any, str, Legal]) -> None:
    folder, model, _, found = made
    ids = torch.tensor(found.tokens.pieces[0].ids)[None]
    wide = model(ids).logits
    other = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    for name, module in other.named_modules():
        if name.endswith("_proj"):
            module.weight.copy_(e4m3(module.weight))
    one = cell(found, "linear weights", "e4m3")
    assert one.kl == near(divergence(wide, other(ids).logits))


def test_what_loses_nothing_is_exactly_zero(made: tuple[Path, Any, str, Legal]) -> None:
    found = made[3]
    assert cell(found, "linear weights", "bf16").exact
    assert cell(found, "linear weights", "bf16").top1 == 1
    assert found.reading(cell(found, "linear weights", "bf16")) == "free"
    assert not found.broke
    assert found.bf16.kl > 0


def test_the_same_run_gives_the_same_table(made: tuple[Path, Any, str, Legal]) -> None:
    folder, _, text, found = made
    again = legal(folder, [text], only=["KV cache", "softmax"])
    assert again.cells == tuple(one for one in found.cells if one.operation in ("KV cache", "softmax"))


def test_an_overflow_is_named(tmp_path: Path) -> None:
    """A row of down_proj that makes sums beyond 65504: FP16 breaks where it is written, added and accumulated."""
    folder, model = toys.llama(tmp_path / "toy")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5] *= 5e4
    found = legal(
        toys.save(folder, model),
        [toys.text(folder)],
        only=["residual", "linear outputs", "linear accumulators"],
    )
    broken = {one.operation: one.broke for one in found.cells if one.dtype == "fp16"}
    assert broken == {
        "linear outputs": "layer 1 mlp.down_proj",
        "linear accumulators": "layer 1 mlp.down_proj",
        "residual": "layer 1 residual after mlp",
    }
    assert all(not one.broke for one in found.cells if one.dtype != "fp16")
    assert found.broke
    assert all(found.reading(one) == "keep wide" for one in found.cells if one.dtype == "fp16")


def test_a_model_that_breaks_by_itself_is_no_reference(tmp_path: Path) -> None:
    folder, text = calibrated.llama(tmp_path / "broken"), calibrated.texts(tmp_path / "texts", 8)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(IncomparableError, match="not finite in float32"):
        legal(folder, text, only=["softmax"])


def test_a_narrow_accumulator_stalls() -> None:
    """16 ones at a time: at 4096 a step of 16 is half of bf16's spacing of 32 and ties to even; FP16 stalls at 32768,
    where its spacing is 32."""
    ones = torch.ones(1, 65504)
    assert float(serial(ones[:, :4096], ones[:, :4096], CASTS["bf16"])) == 4096
    assert float(serial(ones[:, :8192], ones[:, :8192], CASTS["bf16"])) == 4096
    assert float(serial(ones, ones, CASTS["fp16"])) == 32768
    assert float(serial(ones[:, :8192], ones[:, :8192], lambda x: x)) == 8192


def test_casts_are_those_of_ml_dtypes() -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    finite = x[torch.isfinite(x)]
    assert torch.equal(CASTS["e4m3"](finite), e4m3(finite))
    assert torch.equal(CASTS["bf16"](finite), bf16(finite))
    assert torch.isinf(CASTS["fp16"](torch.tensor([65520.0]))).all()
    assert float(CASTS["e4m3"](torch.tensor([1e6]))) == 448
    scaled = CASTS["e4m3 scaled"](torch.tensor([1000.0, 1.0]))
    assert scaled.tolist()[0] == 1000.0
    assert torch.isnan(CASTS["e4m3 scaled"](torch.tensor([float("nan"), 1.0]))[0])


def test_an_unknown_operation_is_refused(made: tuple[Path, Any, str, Legal]) -> None:
    with pytest.raises(UsageError, match="no such operation"):
        legal(made[0], [made[2]], only=["softmaxx"])


def test_the_command(
    made: tuple[Path, Any, str, Legal], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["legal", str(made[0]), "--text", made[2], "--only", "softmax", "--only", "norm inside"]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.split("\n"))) <= 80
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {one["operation"] for one in answer["table"]} == {"softmax", "norm inside"}
    assert {one["reading"] for one in answer["table"]} <= {"free", "like fp8", "keep wide"}
