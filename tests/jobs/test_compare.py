"""Grades, losses and first differences of two checkpoints, against numpy on what the safetensors package reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import toys
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs import matching
from narrowcast.jobs.compare import Compared, Comparison, _outers, compare, differences
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import quantize
from narrowcast.jobs.stream import Silent
from narrowcast.tensors.storage import stored_scheme

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with ragged tiles, in bf16, NVFP4, FP8 blocks and INT4, each also decoded."""
    folder = tmp_path_factory.mktemp("models")
    toys.llama(folder / "bf16", hidden=192, inner=544, layers=1)
    for preset in ("nvfp4a16", "fp8_block", "w4a16_asym"):
        quantize(folder / "bf16", folder / preset, preset)
        convert(folder / preset, folder / f"{preset}_plain", "plain", dtype="fp32")
    return folder


def changed(model: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, out / "model.safetensors", {"format": "pt"}
    )
    return out


def by_name(found: Comparison) -> dict[str, Compared]:
    return {tensor.name: tensor for tensor in found.tensors}


def grades(found: Comparison) -> dict[str, int]:
    return {grade: count for grade, count in found.grades().items() if count}


def test_a_checkpoint_is_itself(models: Path) -> None:
    for name in ("bf16", "nvfp4a16", "w4a16_asym"):
        found = compare(models / name, models / name)
        assert found.passed
        assert grades(found) == {"identical": len(found.tensors)}
        assert {tensor.sqnr for tensor in found.tensors} == {inf}


@pytest.mark.parametrize("preset", ["nvfp4a16", "fp8_block", "w4a16_asym"])
def test_a_decoded_copy_has_equal_values(models: Path, preset: str) -> None:
    """All in fp32: 7 decoded matrices, the embedding and three norms, equal to the bit."""
    found = compare(models / preset, models / f"{preset}_plain")
    assert found.passed
    assert grades(found) == {"equal": 11}


@pytest.mark.parametrize("preset", ["nvfp4a16", "fp8_block", "w4a16_asym"])
@pytest.mark.parametrize("workers", [1, 2])
def test_losses_are_numpys(models: Path, preset: str, workers: int) -> None:
    """Against whole tensors in float64, one sum after another: chunks change the order of sums, so 1e-9 dB apart at
    most for n · 2^-53 < 1e-10."""
    a = load_file(models / "bf16" / "model.safetensors")
    b = load_file(models / f"{preset}_plain" / "model.safetensors")
    found = compare(models / "bf16", models / preset, workers=workers)
    assert not found.passed
    for name, tensor in by_name(found).items():
        if tensor.same:
            continue
        x, y = (side[f"{name}.weight"].double().numpy() for side in (a, b))
        error = np.abs(x - y)
        assert tensor.sqnr == pytest.approx(10 * log10(np.square(x).sum() / np.square(error).sum()), abs=1e-9)
        assert tensor.tally.max_error == error.max()
        assert tensor.tally.max_relative == (error[x != 0] / np.abs(x[x != 0])).max()
        assert tensor.tally.differing == (error != 0).sum()
        assert tensor.first is not None
        row, column = np.argwhere(x != y)[0]
        assert (tensor.first.row, tensor.first.column) == (row, column)
        assert (tensor.first.a, tensor.first.b) == (x[row, column], y[row, column])


def test_the_first_difference_and_its_codes(models: Path, tmp_path: Path) -> None:
    """One nibble of row 5, one scale of row 7: where, how many, both codes in binary, and the signal of all rows."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        packed = tensors[f"{Q}.weight_packed"]
        packed[5, 3] = (packed[5, 3] & 0x0F) | ((packed[5, 3] ^ 0x20) & 0xF0)
        tensors[f"{Q}.weight_scale"].view(torch.uint8)[7, 1] ^= 8

    wrong = changed(models / "nvfp4a16", tmp_path / "wrong", change)
    found = compare(models / "nvfp4a16", wrong)
    (tensor,) = found.worst
    assert (tensor.name, tensor.grade) == (Q, "differs")
    assert (tensor.tally.codes, tensor.tally.scales) == (1, 1)
    assert tensor.first is not None
    assert (tensor.first.row, tensor.first.column) == (5, 7)
    code = int(load_file(models / "nvfp4a16" / "model.safetensors")[f"{Q}.weight_packed"][5, 3]) >> 4
    assert tensor.first.a_code == f"{code:04b}"
    assert tensor.first.b_code == f"{code ^ 2:04b}"
    x = load_file(models / "nvfp4a16_plain" / "model.safetensors")[f"{Q}.weight"].double().numpy()
    assert tensor.tally.errors.signal == pytest.approx(np.square(x).sum(), rel=1e-12)
    assert tensor.tally.errors.elements == x.size


def test_chunks_that_agree_are_counted(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference in the last of many chunks: the others are not decoded at first, and their signal still counts."""
    monkeypatch.setattr("narrowcast.jobs.coded.CHUNK_BYTES", 4096)
    monkeypatch.setattr("narrowcast.jobs.stream.CHUNK_BYTES", 4096)
    monkeypatch.setattr("narrowcast.jobs.compare.BLOCK", 1024)
    name = "model.layers.0.mlp.down_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight_packed"][-1, -1] ^= 0x70

    wrong = changed(models / "nvfp4a16", tmp_path / "wrong", change)
    (tensor,) = compare(models / "nvfp4a16", wrong).worst
    x = load_file(models / "nvfp4a16_plain" / "model.safetensors")[f"{name}.weight"].double().numpy()
    assert tensor.tally.undecoded
    assert tensor.tally.errors.signal == pytest.approx(np.square(x).sum(), rel=1e-12)
    assert tensor.tally.errors.elements == x.size
    assert tensor.first is not None
    assert (tensor.first.row, tensor.first.column) == (x.shape[0] - 1, x.shape[1] - 1)


def test_the_same_codes_in_another_container(models: Path, tmp_path: Path) -> None:
    """compressed-tensors divides by the outer scale, ModelOpt multiplies: the same numbers, spelled differently."""
    convert(models / "nvfp4a16", tmp_path / "modelopt", "modelopt")
    found = compare(models / "nvfp4a16", tmp_path / "modelopt")
    assert found.passed
    assert found.containers == ("compressed-tensors", "modelopt")
    assert grades(found) == {"identical": 4, "respelled": 7}


MULTIPLIER = np.float32(0.0004650297632906586)


def test_a_file_from_modelopt_meets_what_it_became(tmp_path: Path) -> None:
    """Outer scales and scales of inputs become divisors, rounded once, as another producer's need be."""
    source = Path(__file__).parents[1] / "containers" / "upstream" / "modelopt_nvfp4"
    convert(source, tmp_path / "out", "compressed-tensors")
    found = compare(source, tmp_path / "out")
    assert found.passed
    assert grades(found) == {"identical": 8, "respelled": 10}


def test_an_outer_scale_that_is_the_rounded_reciprocal(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A divisor without an exact inverse: the same codes, and values an ulp apart."""
    from narrowcast.jobs.coded import open_coded
    from narrowcast.store.checkpoint import Checkpoint

    with Checkpoint.open(models / "nvfp4a16") as checkpoint:
        side = matching.held(open_coded(checkpoint)).found[Q]
        assert side.coded is not None
        scheme = side.coded.how.scheme
        divides = stored_scheme(
            scheme.element, scheme.inner.tile, scheme.inner.format, outer=True, divides=True
        )
        how = replace(side.coded.how, scheme=divides)
        coded = replace(side.coded, stored=replace(side.coded.stored, how=how))
        other = replace(side, source=coded)
        for multiplier, divisor, wanted in (
            (np.float32(1) / np.float32(3), 3.0, False), (0.5, 2.0, False), (0.3, 3.0, None),
            (MULTIPLIER, float(np.float32(1) / MULTIPLIER), False),  # no multiplier is this divisor's reciprocal
        ):  # fmt: skip
            values = {id(side.coded): float(multiplier), id(coded): divisor}
            monkeypatch.setattr(type(coded), "outer", lambda self, source, values=values: values[id(self)])
            assert _outers(side, other) is wanted
            assert _outers(other, side) is wanted


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stacked_and_unstacked_experts_meet(tmp_path: Path, family: str) -> None:
    """Matrices and biases of a stack, and of experts on their own, which quantizing makes of it."""
    model = toys.moe(tmp_path / "m", family, hidden=64, inner=32)
    quantize(model, tmp_path / "q", "fp8_dynamic")
    convert(tmp_path / "q", tmp_path / "p", "plain")
    found = compare(model, tmp_path / "p", min_sqnr=25)
    assert found.passed
    assert (found.only_a, found.only_b) == ((), ())
    experts = [tensor for tensor in found.tensors if tensor.role == "expert"]
    assert len(experts) == 4 * 3
    biases = [tensor for tensor in found.tensors if tensor.role == "bias"]
    assert len(biases) == (4 * 3 if family == "gpt_oss" else 0)
    assert {tensor.grade for tensor in biases} <= {"respelled"}
    assert compare(tmp_path / "q", tmp_path / "p", min_sqnr=45).passed  # one rounding to bf16


def test_a_head_that_is_tied_meets_one_that_is_stored(tmp_path: Path) -> None:
    tied = toys.llama(tmp_path / "tied", layers=1)
    tensors = load_file(tied / "model.safetensors")
    (tmp_path / "own").mkdir()
    stored = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    own = shutil.copytree(tied, tmp_path / "own", dirs_exist_ok=True)
    save_file(stored, own / "model.safetensors", {"format": "pt"})
    for pair in ((tied, own), (own, tied)):
        found = compare(*pair)
        assert found.passed
        assert by_name(found)["lm_head"].grade == "identical"
    stored["lm_head.weight"][0, 0] += 1
    save_file(stored, own / "model.safetensors", {"format": "pt"})
    assert [tensor.name for tensor in compare(tied, own).worst] == ["lm_head"]


def test_what_one_side_lacks_and_other_shapes(tmp_path: Path) -> None:
    a = toys.llama(tmp_path / "a", layers=1)
    b = toys.llama(tmp_path / "b", layers=1, inner=320, head=True)
    found = compare(a, b, min_sqnr=-100)
    assert not found.passed
    assert found.only_b == ()  # a's head is its embedding
    assert {tensor.grade for tensor in found.tensors if tensor.role == "mlp"} == {"shape"}
    assert {tensor.sqnr for tensor in found.tensors if tensor.role == "mlp"} == {-inf}
    smaller = changed(
        a, tmp_path / "c", lambda tensors: [tensors.pop(name) for name in list(tensors) if "norm" in name]
    )
    assert [name for name, _ in compare(a, smaller).only_a] == [
        "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight", "model.norm.weight",
    ]  # fmt: skip
    assert not compare(a, smaller, min_sqnr=0).passed


def test_dtypes_integers_nan_and_infinity(tmp_path: Path) -> None:
    config = toys.llama_config()
    x = np.array([[1, -2, np.nan, 0.0, np.inf, 4]], np.float32)
    tensors: dict[str, Any] = {
        "a.weight": x,
        "b": np.array([1, 2**53 + 1], np.int64),
        "c": np.array(3, np.float32),
    }
    toys.write(tmp_path / "a", tensors, config)
    toys.write(tmp_path / "same", {**tensors, "a.weight": x.astype(np.float16)}, config)
    found = by_name(compare(tmp_path / "a", tmp_path / "same"))
    assert [found[name].grade for name in ("a", "b", "c")] == ["equal", "identical", "identical"]
    y = np.array([[1, -2, 7, -0.0, np.inf, 4]], np.float32)
    toys.write(tmp_path / "b", {**tensors, "a.weight": y, "b": np.array([1, 2**53], np.int64)}, config)
    found = by_name(compare(tmp_path / "a", tmp_path / "b"))
    assert (found["a"].grade, found["a"].sqnr, found["a"].tally.differing) == ("differs", -inf, 1)
    assert found["a"].tally.max_error == inf
    assert (found["b"].grade, found["b"].tally.differing) == ("differs", 1)


def test_integers_beyond_float64_are_compared_by_their_bits(tmp_path: Path) -> None:
    """2^53 + 1 is 2^53 in float64, where their difference is zero."""
    config = toys.llama_config()
    toys.write(tmp_path / "a", {"b": np.array([2**53 + 1], np.int64)}, config)
    toys.write(tmp_path / "b", {"b": np.array([2**53], np.int64)}, config)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [tensor.grade for tensor in found.tensors] == ["differs"]
    assert not found.passed


def test_scales_of_inputs_and_caches(tmp_path: Path) -> None:
    """Static scales are compared as numbers; where a matrix has none on the other side, that is a note."""
    upstream = Path(__file__).parents[1] / "containers" / "upstream" / "compressed_tensors_fp8_kv"
    found = compare(upstream, upstream)
    assert found.passed
    roles = {tensor.role for tensor in found.tensors}
    assert "KV cache scale" in roles
    convert(upstream, tmp_path / "plain", "plain")
    other = compare(upstream, tmp_path / "plain", min_sqnr=40)
    assert [name for name, _ in other.only_a if "scale)" not in name] == []
    scale = next(name for name in load_file(upstream / "model.safetensors") if name.endswith("k_scale"))
    wrong = changed(upstream, tmp_path / "wrong", lambda tensors: tensors[scale].mul_(2))
    assert [tensor.role for tensor in compare(upstream, wrong).worst] == ["KV cache scale"]


@pytest.mark.parametrize(
    "fixture",
    [
        "awq_gemm_asym",
        "gpt_oss_mxfp4",
        "gptq_v1_4bit_asym_desc_act",
        "gptq_v2_3bit_sym",
        "native_fp8_deepseek_v3",
    ],
)
def test_files_of_other_libraries(tmp_path: Path, fixture: str) -> None:
    """Columns in another order, zero points, stacks in OpenAI's names: a file is itself, and its decode."""
    upstream = Path(__file__).parents[1] / "containers" / "upstream" / fixture
    convert(upstream, tmp_path / "plain", "plain", dtype="fp32")
    found = compare(upstream, tmp_path / "plain")
    assert found.passed
    assert set(grades(found)) == {"equal"}
    assert set(grades(compare(upstream, upstream))) == {"identical"}


def test_factors_of_columns_are_part_of_the_weight(tmp_path: Path) -> None:
    """ModelOpt's AWQ multiplies the input by pre_quant_scale: one more factor in every value, of the same codes."""
    upstream = Path(__file__).parents[1] / "containers" / "upstream" / "modelopt_w4a16_awq"
    name = next(n for n in load_file(upstream / "model.safetensors") if n.endswith("pre_quant_scale"))
    wrong = changed(upstream, tmp_path / "wrong", lambda tensors: tensors[name].mul_(2))
    (tensor,) = compare(upstream, wrong).worst
    assert tensor.name == name.removesuffix(".pre_quant_scale")
    assert (tensor.tally.codes, tensor.tally.scales) == (0, 0)
    assert tensor.sqnr == pytest.approx(0, abs=1e-9)  # b = 2 a
    assert tensor.diagnosis is not None
    assert tensor.diagnosis.name == "scaled by a constant"


def test_a_rotated_model_is_noted() -> None:
    upstream = Path(__file__).parents[1] / "containers" / "upstream" / "compressed_tensors_spinquant_w4a16"
    found = compare(upstream, upstream)
    assert found.passed
    assert [note[:1] for note in found.notes if "hadamard" in note] == ["A", "B"]


def test_only(models: Path) -> None:
    assert [t.name for t in compare(models / "bf16", models / "bf16", only=Q).tensors] == [Q]
    linear = compare(models / "bf16", models / "nvfp4a16", only=["Linear", "model.norm.weight"])
    assert {tensor.role for tensor in linear.tensors} == {"attention", "mlp", "norm"}
    with pytest.raises(UsageError, match="q_proj"):
        compare(models / "bf16", models / "nvfp4a16", only="model.layers.0.self_attn.q_prj")


def test_contradictions_are_refused(models: Path, tmp_path: Path) -> None:
    wrong = changed(models / "fp8_block", tmp_path / "w", lambda tensors: tensors.pop(f"{Q}.weight_scale"))
    with pytest.raises(CheckpointError):
        compare(models / "bf16", wrong)


def test_progress_counts_every_byte_of_both(models: Path) -> None:
    seen: list[int] = []

    class Counting(Silent):
        def __init__(self, total: int, label: str) -> None:
            seen.append(total)

        def advance(self, n: int) -> None:
            seen[0] -= n

    compare(models / "bf16", models / "nvfp4a16", progress=Counting, workers=1)
    assert abs(seen[0]) < 100  # one byte a chunk is lost to whole numbers


def test_differences_of_nothing() -> None:
    assert differences(np.zeros((0, 3)), np.zeros((0, 3))).first is None
