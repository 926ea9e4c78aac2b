"""What a trace counts, beside hooks on transformers' own model in eager attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from narrowcast.cli import main
from narrowcast.runtime import operations as op
from narrowcast.runtime.operations import Operation
from narrowcast.studies.trace import Trace, trace
from narrowcast.studies.trace_counts import Counts, rows
from studies import traced_toys as toys

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "act_fn")
NORMS = ("input_layernorm", "post_attention_layernorm")


@contextmanager
def hooked(model: Any) -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Outputs by (layer, name): modules by hooks; rotary, scores and PV by wrapping the model file's own functions."""
    seen: dict[tuple[int, str], torch.Tensor] = {}
    hooks, now = [], [0]
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, i=i: now.__setitem__(0, i)))
        for path, module in layer.named_modules():
            leaf = path.rpartition(".")[2]
            if leaf in (*LEAVES, *NORMS):
                hooks.append(
                    module.register_forward_hook(lambda m, a, o, key=(i, leaf): seen.__setitem__(key, o))
                )
        hooks.append(
            layer.register_forward_hook(
                lambda m, a, o, i=i: seen.__setitem__(
                    (i, "residual after mlp"), o[0] if type(o) is tuple else o
                )
            )
        )
        hooks.append(
            layer.mlp.register_forward_pre_hook(lambda m, a, i=i: seen.__setitem__((i, "into mlp"), a[0]))
        )
        hooks.append(
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda m, a, i=i: seen.__setitem__((i, "act*up"), a[0])
            )
        )
        hooks.append(
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda m, a, i=i: seen.__setitem__((i, "residual after self_attn"), a[0])
            )
        )
    eager = modeling_llama.eager_attention_forward

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        i = now[0]
        wide = modeling_llama.repeat_kv(key, module.num_key_value_groups)
        seen[i, op.QUERY], seen[i, op.KEY], seen[i, op.VALUE] = query, key, value
        seen[i, "q·k"] = query @ wide.transpose(2, 3)
        seen[i, "scores"] = seen[i, "q·k"] * scaling
        out, weights = eager(module, query, key, value, mask, scaling, **rest)
        seen[i, "softmax"], seen[i, "PV"] = weights, out
        return out, weights

    modeling_llama.eager_attention_forward = attention
    try:
        yield seen
    finally:
        modeling_llama.eager_attention_forward = eager
        for hook in hooks:
            hook.remove()


def ids_of(found: Trace) -> torch.Tensor:
    return torch.tensor(found.pieces[0].ids)[None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    folder, model = toys.llama(tmp_path_factory.mktemp("plain") / "toy")
    return toys.save(folder, model), model, toys.text(folder)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """Row 5 of layer 1's down_proj 50,000 times as large: every weight fits into FP16, some sums do not."""
    folder, model = toys.llama(tmp_path_factory.mktemp("planted") / "toy")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5] *= 5e4
    return toys.save(folder, model), model, toys.text(folder)


def test_every_operation_has_the_amax_of_a_hook(plain: tuple[Path, Any, str]) -> None:
    folder, model, text = plain
    found = trace(folder, [text])
    with hooked(model) as seen, torch.no_grad():
        logits = model(ids_of(found)).logits
    told = {(one.operation.layer, one.operation.name): one for one in found.counts}
    compared = 0
    for key, value in seen.items():
        if key[1] == "into mlp":
            continue
        assert told[key].amax == float(value.abs().max()), key
        compared += 1
    assert compared == 3 * 20
    assert told[3, "logits"].amax == float(logits.abs().max())
    assert told[-1, "embedding"].amax == float(model.model.embed_tokens(ids_of(found)).detach().abs().max())


def test_places_are_those_of_the_largest_element(plain: tuple[Path, Any, str]) -> None:
    folder, model, text = plain
    found = trace(folder, [text])
    with hooked(model) as seen, torch.no_grad():
        model(ids_of(found))
    told = {(one.operation.layer, one.operation.name): one for one in found.counts}
    heads = 4
    for (layer, name), value in seen.items():
        one = told.get((layer, name))
        if one is None:
            continue
        assert one.at is not None
        token, channel, x = one.at.token, one.at.channel, value[0]
        if name in (op.QUERY, op.KEY, op.VALUE, "q·k", "scores", "softmax"):
            size = x.shape[-1]
            if name in (op.KEY, op.VALUE):  # heads are repeated before they enter the product
                x = x.repeat_interleave(heads // x.shape[0], 0)
            assert float(x[channel // size, token, channel % size]) == one.at.value, name
        else:
            assert float(x.reshape(x.shape[0], -1)[token, channel]) == one.at.value, name
        assert abs(one.at.value) == one.amax


def test_a_planted_row_is_named_with_its_weight_channel_and_token(planted: tuple[Path, Any, str]) -> None:
    folder, model, text = planted
    found = trace(folder, [text])
    first = found.overflow
    assert first is not None
    assert first.at is not None
    with hooked(model) as seen, torch.no_grad():
        model(ids_of(found))
    weight = model.model.layers[1].mlp.down_proj.weight.detach()
    out = seen[1, "down_proj"][0]
    token = int(out[:, 5].abs().argmax())
    assert found.where(first.operation) == "layers.1.mlp.down_proj"
    assert (first.at.token, first.at.channel) == (token, 5)
    assert found.text(first.at) == f"w{7 * token % 64}"
    terms = seen[1, "act*up"][0, token] * weight[5]
    k = int(terms.abs().argmax())
    assert "weight row 5 (5e+04 x the median row's norm)" in first.why
    assert f"{100 * float(terms[k] / terms.sum()):.0f} % input channel {k}:" in first.why
    assert found.cause(first) is first
    assert first.headroom("fp16") < 0


def test_a_run_in_float16_breaks_where_transformers_breaks(planted: tuple[Path, Any, str]) -> None:
    """inf in the residual stream; the norm squares it, its mean is inf, rsqrt gives 0, and inf · 0 is NaN while every
    other channel becomes 0; the next product spreads the NaN over all channels."""
    folder, _, text = planted
    found = trace(folder, [text], dtype="float16")
    chain = found.chain
    assert chain is not None
    half = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="float16", attn_implementation="eager")
    broken: list[str] = []
    states: dict[str, torch.Tensor] = {}

    def note(name: str, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            states[name] = out
            if not bool(torch.isfinite(out).all()):
                broken.append(name)

    for name, module in half.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda m, a, o, name=name: note(name, o))
    with torch.no_grad():
        half(ids_of(found))
    assert broken[:2] == ["model.layers.1.mlp.down_proj", "model.layers.2.input_layernorm"]
    assert found.where(chain.step.operation) == "layers.1.mlp.down_proj"
    token = chain.first.token
    bad = ~torch.isfinite(states[broken[0]][0]).all(1)
    assert token == int(bad.int().argmax())
    assert chain.step.tokens == int(bad.sum())

    told = {f"{step.operation.path} {step.operation.name}": step for step in chain.after}
    width = 32
    norm = told["input_layernorm input_layernorm"]
    assert told[" residual after mlp"].infinite == 1
    assert told["input_layernorm square"].infinite == 1
    assert (told["input_layernorm mean"].infinite, told["input_layernorm rsqrt"].zero) == (1, 1)
    assert (norm.nan, norm.zero) == (1, width - 1)
    row = states["model.layers.2.input_layernorm"][0, token]
    assert (int(row.isnan().sum()), int((row == 0).sum())) == (1, width - 1)
    assert told["self_attn.q_proj q_proj"].nan == width
    assert chain.bad_tokens == int(states["lm_head"][0].isnan().any(1).sum())


def test_a_run_that_stays_finite_has_no_chain(plain: tuple[Path, Any, str]) -> None:
    folder, _, text = plain
    found = trace(folder, [text], dtype="float16")
    assert found.chain is None
    assert found.overflow is None


def test_pieces_are_told_apart(plain: tuple[Path, Any, str], tmp_path: Path) -> None:
    """The largest embedding of the second document is found there, at its place in the document."""
    folder, model, _ = plain
    size = model.model.embed_tokens.weight.abs().amax(1)
    big, small = int(size[1:].argmax()) + 1, int(size.argmin())
    lines = [" ".join([f"w{small}"] * 6), " ".join([f"w{small}"] * 5 + [f"w{big}"])]
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    found = trace(folder, [str(path)], context=4)
    place = found.counts[0].at
    assert place is not None
    piece = found.pieces[place.piece]
    assert (piece.document, found.position(place), found.text(place)) == (1, 5, f"w{big}")


def test_counts_beyond_and_below() -> None:
    inf, nan = float("inf"), float("nan")
    numbers = [
        65504.0,
        65504.1,
        -70000.0,
        448.0,
        448.1,
        0.0,
        2.0**-24,
        2.0**-25,
        2.0**-9,
        -(2.0**-10),
        inf,
        nan,
    ]
    x = torch.tensor(numbers, dtype=torch.float32).reshape(3, 4)
    counts = Counts(Operation(0, "", op.OTHER, "x", torch.nn.Identity()))
    assert counts.add(x, 0, torch.arange(3)) == 0
    assert (counts.amax, counts.at.channel, counts.at.value) == (70000.0, 2, -70000.0)  # type: ignore[union-attr]
    beyond = sum(abs(n) > 65504 for n in x.flatten().tolist() if n != inf)
    assert counts.beyond == {"fp16": beyond, "e4m3": 4}
    assert counts.below == {"fp16": 1, "e4m3": 3}
    assert (counts.infinite, counts.nan, counts.elements) == (1, 1, 12)


def test_massive_activations_and_outlier_channels() -> None:
    x = torch.ones(8, 10)
    x[3, 4] = -1001.0  # above 100, and above 1000 medians
    x[5, 6] = 900.0  # above 100 only
    counts = Counts(Operation(0, "", op.RESIDUAL, "x", torch.nn.Identity()))
    counts.add(x, 2, torch.arange(8))
    assert counts.massive == 1
    place = counts.massive_at[0]
    assert (place.piece, place.token, place.channel, place.value) == (2, 3, 4, -1001.0)
    assert [channel for channel, _ in counts.outliers] == [4, 6]


def test_rows_put_heads_side_by_side() -> None:
    x = torch.arange(2 * 5 * 3).reshape(1, 2, 5, 3)  # heads, tokens, size
    assert rows(x, 5, op.QUERY)[4].tolist() == [*x[0, 0, 4].tolist(), *x[0, 1, 4].tolist()]
    assert torch.equal(rows(x.transpose(1, 2), 5, op.NORM), rows(x, 5, op.QUERY))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_norm_of_as_many_heads_as_tokens(transposed: bool) -> None:
    projected = torch.arange(5.0 * 5 * 3).reshape(1, 5, 5 * 3)
    heads = projected.view(1, 5, 5, 3)
    assert torch.equal(rows(heads.transpose(1, 2) if transposed else heads, 5, op.NORM), projected[0])
    assert torch.equal(rows(heads, 5, op.SCORES), heads[0].transpose(0, 1).reshape(5, 15))


FAMILIES: dict[str, dict[str, int]] = {
    "qwen2": {}, "qwen3": {"head_dim": 8}, "mistral": {}, "gemma2": {"head_dim": 8}, "gemma3_text": {"head_dim": 8},
    "phi3": {"pad_token_id": 0}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_show_the_same_operations(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some families have a tokenizer class of their own, which makes nothing of a vocabulary of words.
    words = transformers.PreTrainedTokenizerFast.from_pretrained
    monkeypatch.setattr("narrowcast.studies.tokens.tokenizer_of", lambda run: words(run.root))
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING[family](**sizes | FAMILIES[family])
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    folder = toys.save(tmp_path / family, model)
    found = trace(folder, [toys.text(tmp_path)])
    kinds = {one.operation.kind for one in found.counts if one.operation.layer == 0}
    wanted = {
        op.LINEAR,
        op.NORM,
        op.QUERY,
        op.KEY,
        op.VALUE,
        op.ROTARY,
        op.SCORES,
        op.SOFTMAX,
        op.PV,
        op.RESIDUAL,
    }
    assert wanted | {op.PRODUCT} <= kinds
    if "num_experts_per_tok" in FAMILIES[family]:
        assert {op.ROUTER, op.EXPERTS} <= kinds
    residuals = [
        one for one in found.counts if one.operation.kind == op.RESIDUAL and one.operation.layer == 0
    ]
    assert len(residuals) == 2
    with torch.no_grad():
        out = model(ids_of(found), output_hidden_states=True)
    last = found.stream[1]
    assert last.amax == pytest.approx(float(out.hidden_states[1].abs().max()), rel=1e-5)


def test_the_command(
    planted: tuple[Path, Any, str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder, _, text = planted
    assert main(["trace", str(folder), "--text", text]) == 0
    page = capsys.readouterr().out.split("\n")
    assert page[2].startswith("FP16 would overflow first at layers.1.mlp.down_proj, channel 5, token")
    assert max(map(len, page)) <= 80
    assert main(["trace", str(folder), "--text", text, "--dtype", "float16"]) == 1
    page = capsys.readouterr().out.split("\n")
    assert page[2].startswith("layers.1.mlp.down_proj became infinite first: channel 5, token")
    assert max(map(len, page)) <= 80
    assert main(["trace", str(folder), "--text", text, "--dtype", "float16", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["chain"]["where"] == "layers.1.mlp.down_proj"
    assert answer["chain"]["token_text"].startswith("w")
    assert {one["kind"] for one in answer["operations"]} >= {op.SCORES, op.LINEAR, op.LOGITS}
