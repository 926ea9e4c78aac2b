"""Every mistake is found where it was made, under its own name, and none where nothing is wrong."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import toys
from narrowcast.jobs import diagnosing
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.compare import Compared, compare
from narrowcast.jobs.convert import convert
from narrowcast.jobs.diagnosing import MISTAKES, Case, Diagnosis, diagnose
from narrowcast.jobs.matching import Held, held
from narrowcast.jobs.quantize import quantize
from narrowcast.store.checkpoint import Checkpoint

Change = Callable[[dict[str, torch.Tensor]], None]
SIZES = {"hidden": 512, "inner": 1024, "layers": 1}
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose tiles of 16 columns and of 128 rows differ in size, as trained weights do and drawn ones do not,
    quantized in several ways."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(1)
    tensors = toys.weights(toys.llama_shapes(**SIZES), "fp32")
    for x in tensors.values():
        if x.ndim == 2:
            rows, columns = (rng.lognormal(0, 0.5, -(-size // 16)) for size in x.shape)
            grid = np.exp2(rng.integers(-2, 3, (-(-x.shape[0] // 128), -(-x.shape[1] // 16))))
            x *= np.repeat(rows, 16)[: len(x), None] * np.repeat(columns, 16)[: x.shape[1]]
            x *= np.repeat(np.repeat(grid, 128, 0), 16, 1)[: len(x), : x.shape[1]]
    bf16 = {name: x.astype(toys.DTYPES["bf16"]) for name, x in tensors.items()}
    toys.write(folder / "bf16", bf16, toys.llama_config(**SIZES))
    for preset in ("nvfp4a16", "w4a16", "w4a16_asym", "w8a16", "fp8_block", "fp8_dynamic", "mxfp4a16"):
        quantize(folder / "bf16", folder / preset, preset)
    toys.moe(folder / "gpt_oss", "gpt_oss", hidden=64, inner=64)
    toys.llama(folder / "other", **SIZES, seed=7)
    return folder


def changed(model: Path, out: Path, change: Change) -> Path:
    """A copy of a checkpoint whose tensors were changed, with its config and side files."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, out / "model.safetensors", {"format": "pt"}
    )
    return out


def found(a: Path, b: Path, name: str) -> Compared:
    (tensor,) = compare(a, b, only=name, workers=1).tensors
    return tensor


def said(a: Path, b: Path, name: str) -> Diagnosis:
    diagnosis = found(a, b, name).diagnosis
    assert diagnosis is not None
    return diagnosis


def swap_nibbles(tensors: dict[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        if name.endswith("weight_packed"):
            tensors[name] = (x << 4) | (x >> 4)


def test_swapped_nibbles(models: Path, tmp_path: Path) -> None:
    """Field case 9: about -3 dB as it is, more than 15 dB once they are swapped back; so in a decoded copy."""
    swapped = changed(models / "nvfp4a16", tmp_path / "swapped", swap_nibbles)
    convert(swapped, tmp_path / "plain", "plain")
    honest = diagnosing.sqnr(*values(models / "bf16", models / "nvfp4a16", Q))
    for b in (swapped, tmp_path / "plain"):
        diagnosis = said(models / "bf16", b, Q) if b is swapped else said(models / "nvfp4a16", b, Q)
        assert diagnosis.name == "swapped neighbours"
        assert -4 < diagnosis.before < -2
        assert diagnosis.after > 15
    assert said(models / "bf16", swapped, Q).after == honest
    assert said(models / "nvfp4a16", tmp_path / "plain", Q).after == math.inf


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("preset", ["w4a16_asym"])
def test_zero_points_off_by_one(models: Path, tmp_path: Path, preset: str, step: int) -> None:
    """Undone, the loss is exactly that of the file as it was; the file itself differs by nothing."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_zero_point"):  # eight zero points in a word, none of them 0 or 15
                tensors[name] = tensors[name] + step * 0x11111111

    wrong = changed(models / preset, tmp_path / "wrong", change)
    diagnosis = said(models / "bf16", wrong, Q)
    assert diagnosis.name == "zero point off by one"
    assert diagnosis.after == diagnosing.sqnr(*values(models / "bf16", models / preset, Q))
    assert said(models / preset, wrong, Q).after == math.inf
    assert said(wrong, models / preset, Q).name == "zero point off by one"


def test_gptq_taken_for_its_other_version(tmp_path: Path) -> None:
    """Field case 14 on a file that GPTQModel wrote: v1 asymmetric, relabelled v2. A zero of 0 is stored as 15, and one
    of 15 carries into its neighbour, since readers add 1 to the zeros of a whole word: such pairs stay wrong."""
    upstream = Path(__file__).parents[1] / "containers" / "upstream" / "gptq_v1_4bit_asym_desc_act"
    wrong = Path(shutil.copytree(upstream, tmp_path / "wrong"))
    for name in ("config.json", "quantize_config.json"):
        text = (wrong / name).read_text()
        (wrong / name).write_text(re.sub(r'(format": )"gptq"', r'\1"gptq_v2"', text))
    found = [tensor for tensor in compare(upstream, wrong).tensors if not tensor.same]
    assert len(found) == 7
    diagnoses = [tensor.diagnosis for tensor in found if tensor.diagnosis is not None]
    assert [diagnosis.name for diagnosis in diagnoses] == 7 * ["zero point off by one"]
    assert sum(diagnosis.after == math.inf for diagnosis in diagnoses) == 3  # those without a zero of 0


def test_eight_bit_zero_points_off_by_one_are_seen(models: Path, tmp_path: Path) -> None:
    """One step of INT8 costs little, and still more than INT8 does. The decoded copy holds what the codes do not."""
    convert(models / "w8a16", tmp_path / "right", "plain", dtype="fp32")
    rows = values(models / "w8a16", models / "w8a16", Q)[0]
    steps = load_file(models / "w8a16" / "model.safetensors")[f"{Q}.weight_scale"].float().numpy()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"] += torch.from_numpy(np.repeat(steps, rows.shape[1] // steps.shape[1], 1))

    wrong = changed(tmp_path / "right", tmp_path / "wrong", change)
    diagnosis = said(models / "w8a16", wrong, Q)
    assert diagnosis.name == "zero point off by one"
    assert diagnosis.before > 20


def plain_with(models: Path, preset: str, out: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """The fp32 decode of a quantized model, with q changed."""
    out.mkdir(exist_ok=True)
    convert(models / preset, out / "plain", "plain", dtype="fp32")

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"] = torch.from_numpy(change(tensors[f"{Q}.weight"].numpy()))

    return changed(out / "plain", out / "wrong", apply)


def outer(models: Path) -> np.float32:
    """NVFP4's outer scale of q, which compressed-tensors stores as a divisor."""
    stored = load_file(models / "nvfp4a16" / "model.safetensors")[f"{Q}.weight_global_scale"]
    return np.float32(1) / np.float32(stored.item())


def test_scales_left_out(models: Path, tmp_path: Path) -> None:
    scale = load_file(models / "fp8_dynamic" / "model.safetensors")[f"{Q}.weight_scale"].float().numpy()
    codes = plain_with(models, "fp8_dynamic", tmp_path / "all", lambda x: np.round(x / scale * 512) / 512)
    diagnosis = said(models / "fp8_dynamic", codes, Q)
    assert (diagnosis.name, diagnosis.after) == ("scale left out", math.inf)
    assert diagnosis.said == "B is what A's codes are without any scale"
    assert said(codes, models / "fp8_dynamic", Q).said == "A is what B's codes are without any scale"

    half = plain_with(models, "nvfp4a16", tmp_path / "outer", lambda x: x / outer(models))
    diagnosis = said(models / "nvfp4a16", half, Q)
    assert (diagnosis.name, diagnosis.after) == ("scale left out", math.inf)
    assert diagnosis.said == "B is what A's codes are without the outer scale"

    inner = load_file(models / "nvfp4a16" / "model.safetensors")[f"{Q}.weight_scale"].float().numpy()
    inner = np.repeat(np.where(inner, inner, 1), 16, 1)
    other = plain_with(models, "nvfp4a16", tmp_path / "inner", lambda x: x / inner)
    diagnosis = said(models / "nvfp4a16", other, Q)
    assert diagnosis.name == "scale left out"
    assert diagnosis.said == "B is what A's codes are without the innermost scales"
    assert diagnosis.after > 120  # x · s / s in fp32: each rounds by 2^-24 at most


def test_scales_inverted(models: Path, tmp_path: Path) -> None:
    """Field case 8: the outer scale the other way, values off by its square; and inner ones."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_global_scale"):
                tensors[name] = 1 / tensors[name]

    wrong = changed(models / "nvfp4a16", tmp_path / "outer", change)
    diagnosis = said(models / "nvfp4a16", wrong, Q)
    assert (diagnosis.name, diagnosis.after) == ("scale inverted", math.inf)
    assert diagnosis.said.endswith("the outer one")
    a, b = values(models / "nvfp4a16", wrong, Q)
    assert set(np.unique(a[a != 0] / b[a != 0])) == {outer(models) ** 2}
    assert said(models / "bf16", wrong, Q).name == "scale inverted"

    def invert(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name] = 1 / tensors[name].float()

    wrong = changed(models / "fp8_block", tmp_path / "inner", invert)
    diagnosis = said(models / "bf16", wrong, Q)
    assert diagnosis.name == "scale inverted"
    assert diagnosis.said.endswith("the innermost one")
    assert diagnosis.after > 28


def test_e4m3_read_as_fnuz(models: Path, tmp_path: Path) -> None:
    """Half of every value, and NaN for the code that is -0 in E4M3FN."""

    def as_fnuz(x: np.ndarray) -> np.ndarray:
        return np.where((x == 0) & np.signbit(x), np.float32(np.nan), x / 2)

    wrong = plain_with(models, "fp8_block", tmp_path, as_fnuz)
    tensor = found(models / "fp8_block", wrong, Q)
    assert tensor.diagnosis is not None
    assert tensor.diagnosis.name == "E4M3FN read as E4M3FNUZ"
    assert tensor.diagnosis.after == math.inf
    assert (
        said(models / "nvfp4a16", plain_with(models, "nvfp4a16", tmp_path / "scales", as_fnuz), Q).after
        == math.inf
    )


@pytest.mark.parametrize(("factor", "words"), [(4.0, "A is 2^-2 times B"), (-3.0, "A is -0.3333 times B")])
def test_a_constant_factor(models: Path, tmp_path: Path, factor: float, words: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"] * factor

    diagnosis = said(models / "bf16", changed(models / "bf16", tmp_path / "wrong", change), Q)
    assert diagnosis.name == "scaled by a constant"
    assert diagnosis.said.endswith(words)


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("preset", ["nvfp4a16", "w4a16", "mxfp4a16"])
def test_scales_off_by_one(models: Path, tmp_path: Path, preset: str, axis: int | None) -> None:
    """Along columns, along rows (whose groups of 16 differ), and in the order of the file."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, x in tensors.items():
            if name.endswith("weight_scale"):
                tensors[name] = (
                    x.view(torch.uint8 if x.itemsize == 1 else x.dtype).roll(1, axis).view(x.dtype)
                )

    wrong = changed(models / preset, tmp_path / "wrong", change)
    name = "scales off by one"
    if axis == 0:  # rows of a group of 16 have like scales: what is lost is little
        tensor = found(models / preset, wrong, Q)
        assert tensor.diagnosis is None or tensor.diagnosis.name == name
    else:
        assert said(models / preset, wrong, Q).name == name
        assert said(models / "bf16", wrong, Q).name == name


@pytest.mark.parametrize("name", [Q, DOWN])
def test_a_transposed_grid_of_scales(models: Path, tmp_path: Path, name: str) -> None:
    """Of a square grid, and of one that has another shape when it is turned."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        x = tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight_scale"] = x.T.reshape(x.shape)

    wrong = changed(models / "fp8_block", tmp_path / "wrong", change)
    diagnosis = said(models / "fp8_block", wrong, name)
    assert (diagnosis.name, diagnosis.after) == ("scales transposed", math.inf)


@pytest.mark.parametrize("preset", ["bf16", "nvfp4a16"])
def test_transposed_matrices(models: Path, tmp_path: Path, preset: str) -> None:
    """Field case 13: a square one, which its shape does not tell, and one that its shape does."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in (Q, DOWN):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].T

    wrong = changed(models / "bf16", tmp_path / "wrong", change)
    for name in (Q, DOWN):
        tensor = found(models / preset, wrong, name)
        assert tensor.grade == ("differs" if name == Q else "shape")
        assert tensor.diagnosis is not None
        assert tensor.diagnosis.name == "transposed"
        assert tensor.diagnosis.after > 18


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("undone", [False, True])
def test_rotary_order(models: Path, tmp_path: Path, size: int, undone: bool) -> None:
    """llama.cpp's permutation of q, of heads of several sizes, in both directions."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        x = tensors[f"{Q}.weight"]
        heads = len(x) // size
        tensors[f"{Q}.weight"] = x.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(x.shape)

    pair = models / "bf16", changed(models / "bf16", tmp_path / "wrong", change)
    diagnosis = said(*(pair[::-1] if undone else pair), Q)
    assert (diagnosis.name, diagnosis.after) == ("rotary order", math.inf)
    assert f"{size} rows" in diagnosis.said


def test_gate_and_up(models: Path, tmp_path: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        names = f"{GATE}.weight", f"{UP}.weight"
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

    wrong = changed(models / "bf16", tmp_path / "siblings", swap)
    for name in (GATE, UP):
        diagnosis = said(models / "nvfp4a16", wrong, name)
        assert diagnosis.name == "gate and up swapped"
        assert diagnosis.after > 15

    fused = toys.weights({f"{GATE.replace('gate', 'gate_up')}.weight": (256, 128)})
    (name,) = fused
    (tmp_path / "fused").mkdir()
    toys.write(tmp_path / "fused" / "a", fused, toys.llama_config())
    half = {name: np.concatenate([fused[name][128:], fused[name][:128]])}
    diagnosis = said(
        tmp_path / "fused" / "a", toys.write(tmp_path / "fused" / "b", half, toys.llama_config()),
        name.removesuffix(".weight"),
    )  # fmt: skip
    assert (diagnosis.name, diagnosis.after) == ("halves swapped", math.inf)


@pytest.mark.parametrize("turned", [False, True])
def test_gate_and_up_interleaved(models: Path, tmp_path: Path, turned: bool) -> None:
    """Halves in a family that interleaves: each projection of each expert says so."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        x = tensors[f"{EXPERTS}.gate_up_proj"]
        tensors[f"{EXPERTS}.gate_up_proj"] = torch.cat([x[..., ::2], x[..., 1::2]], -1)

    pair = models / "gpt_oss", changed(models / "gpt_oss", tmp_path / "wrong", change)
    for e in range(4):
        for part in ("gate_proj", "up_proj"):
            diagnosis = said(*(pair[::-1] if turned else pair), f"{EXPERTS}.{e}.{part}")
            assert (diagnosis.name, diagnosis.after) == ("gate and up interleaved", math.inf)


def test_scaled_columns(models: Path, tmp_path: Path) -> None:
    """Powers of two, so that bf16 loses nothing; least squares then finds them to the last bits of float64."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        x = tensors[f"{Q}.weight"]
        tensors[f"{Q}.weight"] = x * 2.0 ** (torch.arange(x.shape[1]) % 5 - 2)

    diagnosis = said(models / "bf16", changed(models / "bf16", tmp_path / "wrong", change), Q)
    assert diagnosis.name == "columns scaled"
    assert diagnosis.after > 250


# Silent fixtures ------------------------------------------------------------------------------------------------------


def sides(a: Path, b: Path) -> Iterator[tuple[Held, Held, Case]]:
    """Every matrix of both, while the files are open."""
    with Checkpoint.open(a) as first, Checkpoint.open(b) as second:
        x, y = held(open_coded(first)), held(open_coded(second))
        for name, own in x.found.items():
            other = y.get(name)
            if other is not None and len(own.shape) == 2:
                yield own, other, Case(own, other, x.get, y.get)


def values(a: Path, b: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The sample that a diagnosis sees."""
    return next((case.a.values, case.b.values) for own, _, case in sides(a, b) if own.name == name)


HONEST = ("nvfp4a16", "w4a16", "w4a16_asym", "w8a16", "fp8_block", "fp8_dynamic", "mxfp4a16", "bf16", "other")


@pytest.mark.parametrize(
    ("a", "b"), [("bf16", b) for b in HONEST] + [("w4a16_asym", "fp8_block"), ("w8a16", "w4a16")]
)
def test_silent_where_nothing_is_wrong(models: Path, monkeypatch: pytest.MonkeyPatch, a: str, b: str) -> None:
    """No mistake, asked one by one, explains what quantization costs, or why other weights differ."""
    seen = 0
    for _, _, case in sides(models / a, models / b):
        for mistake in MISTAKES if case.name in (Q, GATE, DOWN) else ():
            monkeypatch.setattr(diagnosing, "MISTAKES", (mistake,))
            assert diagnose(case) is None, (case.name, mistake.name)
            seen += 1
    assert seen == 3 * len(MISTAKES)


def test_silent_on_experts(models: Path, tmp_path: Path) -> None:
    quantize(models / "gpt_oss", tmp_path / "q", "mxfp4a16")
    seen = {case.name: diagnose(case) for _, _, case in sides(models / "gpt_oss", tmp_path / "q")}
    assert len(seen) == 4 + 3 * 4 + 2  # attention, experts, embedding and router
    assert set(seen.values()) == {None}


@pytest.mark.parametrize("preset", ["nvfp4a16", "w4a16", "w8a16", "fp8_block", "mxfp4a16"])
def test_what_a_format_costs_is_not_suspicious(tmp_path: Path, preset: str) -> None:
    """Of bell-shaped weights, by the formula in the module docstring, within its slack on both sides."""
    model = toys.llama(tmp_path / "m", hidden=256, inner=512)
    quantize(model, tmp_path / "q", preset)
    for a, b, case in sides(model, tmp_path / "q"):
        loss = diagnosing.sqnr(case.a.values, case.b.values)
        assert not diagnosing.suspicious(loss, a, b)
        if b.coded is not None:
            assert loss < diagnosing.typical(b.element) + diagnosing.SLACK


def test_every_mistake_has_its_docstring() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    assert all(mistake.guess.__doc__ and mistake.remedy for mistake in MISTAKES)
