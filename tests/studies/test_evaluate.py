"""Evaluation: every number against transformers' logits in float64, zero for equals, refusals, verdicts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from narrowcast.errors import IncomparableError, UsageError
from narrowcast.jobs.quantize import quantize
from narrowcast.statistics.bootstrap import Interval
from narrowcast.studies.calibrate import calibrate
from narrowcast.studies.calibrate_kv import calibrate_kv, save_overlay
from narrowcast.studies.evaluate import Options, evaluate
from narrowcast.studies.evaluation import Asked, Evaluation, Gap, Histogram, Percentiles
from narrowcast.studies.measure import Beside, kl_rows
from studies import calibrated_toys as toys
from studies.words import save_with_words

QUICK = Options(tokens=None, context=40, greedy=0)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.llama(tmp_path_factory.mktemp("evaluate") / "parent")


@pytest.fixture(scope="module")
def child(parent: Path) -> Path:
    out = parent.parent / "fp8"
    quantize(parent, out, "fp8_dynamic")
    return out


@pytest.fixture(scope="module")
def files(parent: Path) -> list[str]:
    return toys.texts(parent.parent / "texts", 90, 33, 57)


def edited(source: Path, name: str, **changes: Any) -> Path:
    """A copy with other fields in its config.json."""
    out = source.parent / name
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))
    return out


def predictions(folder: Path, files: list[str]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """By document and piece of 40 tokens: log-probabilities float64 from transformers' own model, and what followed."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for file in files:
        ids = tokenizer(Path(file).read_text(), return_tensors="pt").input_ids[0]
        rows = []
        for piece in ids.split(40):
            if len(piece) > 1:
                with torch.inference_mode():
                    logits = model(input_ids=piece[None]).logits[0, :-1].double()
                rows.append((torch.log_softmax(logits, 1), piece[1:]))
        found.append(rows)
    return found


def test_every_number_is_what_transformers_logits_give(parent: Path, files: list[str]) -> None:
    """Two unquantized models, so that transformers can run both."""
    other = toys.llama(parent.parent / "other", seed=5)
    found = evaluate(other, parent, text=files, options=QUICK)
    assert found.gap is not None
    sides = [predictions(folder, files) for folder in (parent, other)]
    kl, dp, top1, top5, nll = [], [], [], [], [[], []]
    for document in zip(*sides, strict=True):
        for (p, ids), (q, _) in zip(*document, strict=True):
            kl += (p.exp() * (p - q)).sum(1).tolist()
            rows = torch.arange(len(ids))
            dp += (q[rows, ids].exp() - p[rows, ids].exp()).tolist()
            top1 += (p.argmax(1) == q.argmax(1)).double().tolist()
            best = (
                [set(row.tolist()) for row in p.topk(5).indices],
                [set(row.tolist()) for row in q.topk(5).indices],
            )
            top5 += [len(a & b) / 5 for a, b in zip(*best, strict=True)]
            nll[0] += (-p[rows, ids]).tolist()
            nll[1] += (-q[rows, ids]).tolist()
    gap, n = found.gap, len(kl)
    assert found.text.predicted == n == 88 - 1 + 32 + 56 - 1  # 90, 33 and 57 words in pieces of 40
    # float32 logits of size 30 and log-softmax of 48: some 2^-24 · 30 · 48 each
    close = {"abs": 1e-4}
    assert gap.kl.estimate == pytest.approx(np.mean(kl), **close)
    assert gap.kl_percentiles.largest == pytest.approx(max(kl), **close)
    assert dict(gap.kl_percentiles.at)[90.0] == pytest.approx(np.percentile(kl, 90), **close)
    assert gap.shift.estimate == pytest.approx(np.mean(dp), **close)
    assert gap.shift_rms == pytest.approx(np.sqrt(np.mean(np.square(dp))), **close)
    assert gap.top1.estimate == pytest.approx(np.mean(top1))
    assert gap.top5.estimate == pytest.approx(np.mean(top5))
    assert found.parent is not None
    assert np.log(found.parent.perplexity.estimate) == pytest.approx(np.mean(nll[0]), **close)
    assert np.log(found.child.perplexity.estimate) == pytest.approx(np.mean(nll[1]), **close)
    assert np.log1p(gap.perplexity.estimate) == pytest.approx(np.mean(nll[1]) - np.mean(nll[0]), **close)
    assert sum(gap.kl_histogram.counts) + gap.kl_histogram.zero == n
    assert gap.kl.units == gap.perplexity.units == 3
    worst = gap.worst[0]
    at = int(np.argmax(kl))
    assert worst.kl == pytest.approx(kl[at], **close)
    assert worst.p_child - worst.p_parent == pytest.approx(dp[at], **close)


@pytest.mark.parametrize("copied", [False, True])
def test_the_same_model_is_exactly_the_same(parent: Path, files: list[str], copied: bool) -> None:
    other = parent.parent / "copied" if copied else parent
    if copied:
        shutil.copytree(parent, other)
    found = evaluate(other, parent, text=files, options=Options(tokens=None, context=40, greedy=2))
    gap = found.gap
    assert gap is not None
    assert gap.identical
    assert gap.kl == Interval(0, 0, 0, 3, "t")
    assert (gap.perplexity.estimate, gap.shift_rms, gap.top1.estimate, gap.top5.estimate) == (0, 0, 1, 1)
    assert (found.verdict.says, found.code, gap.worst) == ("identical", 0, ())
    assert found.divergence is not None
    assert all((row.relative, row.cosine, row.least_cosine) == (0, 1, 1) for row in found.divergence.layers)
    if copied:
        assert found.greedy is not None
        assert found.greedy.matching == len(found.greedy.rows) == 2


def test_kl_is_never_negative_and_sees_what_is_small() -> None:
    """Against float64, for distributions from almost equal to disjoint."""
    rng = torch.Generator().manual_seed(0)
    base = 8 * torch.randn(40, 500, generator=rng)
    for size in (1e-4, 1e-2, 1.0, 30.0):
        other = base + size * torch.randn(40, 500, generator=rng)
        p, q = torch.log_softmax(base, 1), torch.log_softmax(other, 1)
        wide = [torch.log_softmax(logits.double(), 1) for logits in (base, other)]
        wanted = (wide[0].exp() * (wide[0] - wide[1])).sum(1)
        found = kl_rows(p, q)
        assert bool((found >= 0).all())
        # log-probabilities down to -60 are rounded at 2^-19; that much of x, once more through x² / 2
        noise = 2 * 2.0**-19 * wanted.sqrt() + 1e-10
        assert bool(((found - wanted).abs() <= noise + 1e-5 * wanted).all())
    assert kl_rows(p, p).tolist() == [0.0] * 40
    masked = p.clone()
    masked[:, 7] = -torch.inf
    assert torch.isfinite(kl_rows(masked, q)).all()
    assert kl_rows(q, masked).min() == torch.inf or bool((q[:, 7].exp() == 0).any())


def test_a_second_bos_is_refused(parent: Path, child: Path, files: list[str]) -> None:
    other = edited(child, "double-bos")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    piece = [{"SpecialToken": {"id": "w1", "type_id": 0}}] * 2 + [{"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": piece, "pair": piece,
        "special_tokens": {"w1": {"id": "w1", "ids": [1], "tokens": ["w1"]}},
    }  # fmt: skip
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(IncomparableError, match=r"token 0 .*\n  got: child double BOS") as caught:
        evaluate(other, parent, text=files, options=QUICK)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("other", [{"num_hidden_layers": 1}, {"hidden_size": 32}])
def test_models_of_other_sizes_are_no_pair(
    parent: Path, tmp_path: Path, files: list[str], other: dict[str, int]
) -> None:
    small = tmp_path / "small"
    config = transformers.AutoConfig.from_pretrained(parent)
    config.update(other)
    save_with_words(small, transformers.AutoModelForCausalLM.from_config(config), toys.WORDS)
    for child, against in ((small, parent), (parent, small)):
        with pytest.raises(IncomparableError, match="not of one architecture"):
            evaluate(child, against, text=files, options=QUICK)


def test_a_checkpoint_without_a_tokenizer_takes_its_parents(
    parent: Path, child: Path, files: list[str]
) -> None:
    other = edited(child, "untokenized")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    found = evaluate(other, parent, text=files[:1], options=QUICK)
    assert found.text.tokenizer == "the parent's; the child has none"
    with pytest.raises(UsageError, match="no tokenizer"):
        evaluate(other, text=files[:1], options=QUICK)


def test_infinity_is_invalid_and_its_layer_is_named(parent: Path, files: list[str]) -> None:
    other = edited(parent, "overflowing")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].mul_(3e38)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(IncomparableError, match="of the child are not finite from layer 1 on"):
        evaluate(other, parent, text=files, options=QUICK)


def test_caches_are_further_lanes_of_the_child(parent: Path, child: Path, files: list[str]) -> None:
    options = Options(tokens=None, context=40, greedy=0, caches=("fp8_e4m3", "int4_per_token_head"))
    found = evaluate(child, parent, text=files, options=options)
    fp8, int4 = found.caches
    assert [row.mode for row in found.caches] == ["fp8_e4m3, unity", "int4_per_token_head"]
    assert (fp8.bytes_per_token, int4.bytes_per_token) == (
        2 * 2 * 2 * 16,
        2 * 2 * 2 * (8 + 4),
    )  # layers, K and V, heads
    assert fp8.alone is not None
    assert int4.alone is not None
    assert 0 < fp8.alone.kl.estimate < int4.alone.kl.estimate


def test_fp8_caches_with_every_kind_of_scale_and_attention(
    parent: Path, child: Path, files: list[str]
) -> None:
    stats = parent.parent / "stats.safetensors"
    calibrate(parent, stats, files[:1], tokens=80, context=40)
    options = Options(
        tokens=None, context=40, greedy=0, caches=("fp8_e4m3", "fp8_head"), scales=stats, attention="fp8"
    )
    found = evaluate(child, parent, text=files, options=options)
    by_name = {row.mode: row.alone for row in found.caches}
    plain = [f"{mode}, {kind}" for mode in ("fp8_e4m3", "fp8_head") for kind in ("unity", "computed")]
    assert list(by_name) == plain + [f"{name}, fp8 attention" for name in plain]
    assert by_name["fp8_e4m3, unity"] == by_name["fp8_head, unity"]
    for name in plain:
        exact, coded = by_name[name], by_name[f"{name}, fp8 attention"]
        assert exact is not None
        assert coded is not None
        assert 0 < exact.kl.estimate < coded.kl.estimate  # queries and probabilities are rounded as well
    with pytest.raises(UsageError, match="no cache mode that takes these"):
        evaluate(child, parent, text=files, options=Options(caches=("mxfp8",), attention="fp8"))


def test_engines_words_for_caches(child: Path, files: list[str]) -> None:
    """vLLM's fp8 is fp8_e4m3, and runs once."""
    options = replace(QUICK, tokens=40, caches=("fp8", "fp8_e4m3", "fp4_mx_block16"))
    found = evaluate(child, text=files[:1], options=options)
    assert [row.mode for row in found.caches] == ["fp8_e4m3, unity", "fp4_mx_block16"]


def test_without_a_parent_it_says_what_a_perplexity_is_good_for(child: Path, files: list[str]) -> None:
    notes = evaluate(child, text=files[:1], options=QUICK).notes
    assert [note for note in notes if "same text, tokenizer and context; --against PARENT" in note]


def test_a_head_that_is_not_stored_and_not_tied_is_named(parent: Path, files: list[str]) -> None:
    other = edited(parent, "headless")
    weights = load_file(other / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    said = "lm_head is not stored and the config does not tie it: the embedding stands in for it"
    assert f"child: {said}" in evaluate(other, parent, text=files[:1], options=QUICK).notes
    tied = edited(other, "headless_tied", tie_word_embeddings=True)
    assert not [note for note in evaluate(tied, text=files[:1], options=QUICK).notes if "lm_head" in note]


def test_other_ends_of_text_are_named(parent: Path, files: list[str]) -> None:
    def notes(model: Path) -> list[str]:
        found = evaluate(model, parent, text=files[:1], options=QUICK)
        more = found.divergence.notes if found.divergence is not None else ()
        return [note for note in (*found.notes, *more) if "eos_token_id" in note]

    first = json.loads((parent / "config.json").read_text())["eos_token_id"]
    assert notes(edited(parent, "same_end")) == []
    said = f"eos_token_id is 7, the parent's {first}; texts end elsewhere"
    assert notes(edited(parent, "other_end", eos_token_id=7))[0] == f"config.json: {said}"
    generates = edited(parent, "generates_on")
    (generates / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert notes(generates) == [f"generation_config.json: {said}"]


def test_a_cache_that_the_checkpoint_asks_for_and_that_did_not_run_is_named(
    parent: Path, files: list[str]
) -> None:
    stats, out = parent.parent / "for_cache.stats", parent.parent / "kv8"
    calibrate(parent, stats, files[:1], tokens=80, context=40)
    quantize(parent, out, "fp8_dynamic+kv8", stats=stats)
    options = Options(tokens=None, context=40, greedy=0)
    said = "the checkpoint asks for an fp8 KV cache, and the child ran with a wide one"
    note = evaluate(out, parent, text=files, options=options).notes[-1]
    assert note == f"{said}; --kv fp8_e4m3 runs that as well"
    found = evaluate(out, parent, text=files, options=replace(options, caches=("fp8_e4m3",)))
    assert found.notes[-1] == said
    assert [row.mode for row in found.caches] == ["fp8_e4m3, unity", "fp8_e4m3, stored"]


def test_scales_of_another_model_are_refused(parent: Path, child: Path, files: list[str]) -> None:
    """Another model of the very same shape: its scales would fit and mean nothing."""
    stats = parent.parent / "other.stats"
    calibrate(toys.llama(parent.parent / "alike", seed=7), stats, files, tokens=None)
    options = Options(tokens=None, context=40, greedy=0, caches=("fp8_e4m3",), scales=stats)
    with pytest.raises(UsageError, match="of another model"):
        evaluate(child, parent, text=files, options=options)


def test_an_overlay_brings_scales_for_its_own_mode(parent: Path, child: Path, files: list[str]) -> None:
    overlay = save_overlay(calibrate_kv(parent, files, measure=0), parent.parent / "kv.overlay")
    options = Options(tokens=None, context=40, greedy=0, caches=("fp8_e4m3",), scales=overlay)
    found = evaluate(child, parent, text=files, options=options)
    assert [row.mode for row in found.caches] == ["fp8_e4m3, unity", "fp8_e4m3, computed"]
    with pytest.raises(UsageError, match="for another cache mode"):
        evaluate(child, parent, text=files, options=replace(options, caches=("fp8_head",)))


def test_an_online_scheme_is_judged_beside_the_model_itself(
    parent: Path, child: Path, files: list[str]
) -> None:
    found = evaluate(parent, online="fp8_dynamic", text=files, options=QUICK)
    stored = evaluate(child, parent, text=files, options=QUICK)
    assert found.gap is not None
    assert stored.gap is not None
    assert found.gap.kl == stored.gap.kl
    assert found.child.online == "fp8_dynamic"
    assert found.divergence is not None
    assert not found.divergence.faults


def test_tokens_are_beginnings_of_as_many_documents_as_possible(parent: Path, files: list[str]) -> None:
    found = evaluate(parent, text=files, options=Options(tokens=100, context=40, greedy=0))
    assert (found.text.documents, found.text.pieces, found.text.predicted) == (
        3,
        3,
        100 - 3 - (100 - 40 - 33 - 27),
    )
    assert (found.verdict.says, found.verdict.code, found.parent) == ("measured", 0, None)


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, 20, "bootstrap")


WORSE = interval(0.03, 0.02, 0.04)


def verdict(asked: Asked, kl: Interval, change: Interval = WORSE) -> tuple[str, int]:
    empty = Percentiles((), 0, 0)
    gap = Gap(
        False, change, kl, empty, Histogram((), (), 0), interval(0.98, 0.97, 0.99), interval(1, 1, 1),
        interval(0, 0, 0), 0, empty,
    )  # fmt: skip
    found = Evaluation(text=None, child=None, gap=gap, asked=asked)  # type: ignore[arg-type]
    return found.verdict.says, found.verdict.code


def test_verdicts() -> None:
    kl = interval(0.01, 0.008, 0.012)
    assert verdict(Asked(max_kl=0.02), kl) == ("fine", 0)
    assert verdict(Asked(max_kl=0.01), kl) == ("undecided", 4)
    assert verdict(Asked(max_kl=0.005), kl) == ("worse", 1)
    assert verdict(Asked(min_top1=0.9), kl) == ("fine", 0)
    assert verdict(Asked(min_top1=0.98), kl) == ("undecided", 4)
    assert verdict(Asked(min_top1=0.999), kl) == ("worse", 1)
    assert verdict(Asked(max_kl=0.01, min_top1=0.999), kl) == ("worse", 1)  # the worst of both
    assert verdict(Asked(), kl) == ("measured", 0)
    assert verdict(Asked(), kl, interval(0.01, -0.01, 0.03)) == ("measured", 0)


def test_logits_are_let_go() -> None:
    """A few numbers per token stay, whatever the vocabulary."""
    beside = Beside(keep=5)
    logits = torch.randn(50, 4000)
    beside.add(0, logits, logits + 1e-3 * torch.randn(50, 4000), torch.arange(50))
    held = sum(
        array.nbytes for name in ("kl", "nll", "shift", "top1", "top5") for array in getattr(beside, name)
    )
    assert held == 5 * 8 * 50
    assert len(beside.worst) == 5
