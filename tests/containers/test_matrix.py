"""Every container × every scheme that it claims × every awkward checkpoint: written, read, decoded and moved on.

quantize → C          C reads its own file as C, with the schemes that were planned
C → plain             the values that compressed-tensors' file of the same scheme decodes to, under the model's names
C → CT → C            the same bytes, wherever the outer scales invert exactly (ours all do)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toys
from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.jobs.coded import Coded, open_coded
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.numbers.formats import BF16
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.presets import presets
from narrowcast.tensors.storage import same_storage

CT = "compressed-tensors"
WRITTEN = [name for name, row in containers.items() if row.spelling is not None]


def fused(folder: Path) -> Path:
    """A Phi-3: q, k, v in one tensor on disk, gate and up in another."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 128), "model.norm.weight": (128,)}
    at = "model.layers.0"
    shapes |= {f"{at}.self_attn.qkv_proj.weight": (256, 128), f"{at}.self_attn.o_proj.weight": (128, 128)}
    shapes |= {f"{at}.mlp.gate_up_proj.weight": (512, 128), f"{at}.mlp.down_proj.weight": (128, 256)}
    shapes |= {"lm_head.weight": (64, 128)}
    config = {
        **toys.llama_config(head=True, layers=1, inner=256),
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
    }
    return toys.write(folder, toys.weights(shapes), config)


SOURCES = {
    "tied": lambda folder: toys.llama(folder, inner=256, layers=1),
    "ragged": lambda folder: toys.llama(folder, hidden=192, inner=544, layers=1),
    "experts": lambda folder: toys.moe(folder, "qwen3_moe", hidden=128, inner=128),
    "gpt_oss experts": lambda folder: toys.moe(folder, "gpt_oss", hidden=128, inner=64),
    "fused on disk": fused,
    "pairs split over shards": lambda folder: toys.llama(folder, inner=256, layers=1, shards=3),
}
QUICK = ("ragged", "gpt_oss experts")


def claims(container: str, preset: str) -> bool:
    """Whether a container has a spelling for a preset's weights and inputs."""
    row = containers[container]
    assert row.spelling is not None
    try:
        row.spelling(presets[preset].linear, BF16)
    except UsageError:
        return False
    return True


CASES = [
    pytest.param(
        container,
        preset,
        source,
        marks=[] if source in QUICK or preset in ("nvfp4a16", "w4a16") else [pytest.mark.slow],
    )
    for container in WRITTEN
    for preset in toys.PRESETS
    if claims(container, preset)
    for source in SOURCES
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name.replace(" ", "_")) for name, make in SOURCES.items()}


def options(container: str, source: str) -> dict[str, Any]:
    """gpt-oss's container holds nothing but stacked experts."""
    return {"targets": "re:.*experts.*"} if container == "mxfp4" else {}


def divides(model: Path, tmp_path: Path, container: str, preset: str, chosen: dict[str, Any]) -> bool:
    """Whether the shapes fill the whole words and rows that a container needs; if not, that is said before any byte."""
    try:
        plan(model, tmp_path / "c", preset, container=container, **chosen)
    except UsageError as refused:
        if "cannot divide" not in refused.problem:
            raise
        return False
    return True


@pytest.mark.parametrize(("container", "preset", "source"), CASES)
def test_written_read_decoded_and_moved_on(
    tmp_path: Path, models: dict[str, Path], container: str, preset: str, source: str
) -> None:
    model = models[source]
    chosen = options(container, source)
    if container == "mxfp4" and source != "gpt_oss experts":
        with pytest.raises(UsageError):
            plan(model, tmp_path / "c", preset, container=container, **chosen)
        return
    if not divides(model, tmp_path, container, preset, chosen):
        # Quark has whole blocks only, and the narrow k and v of these toys are half of one.
        narrow = (container, preset) == ("quark", "fp8_block")
        assert narrow or source in ("ragged", "gpt_oss experts", "fused on disk", "experts")
        return
    settled = plan(model, tmp_path / "c", preset, container=container, **chosen)
    run(settled)
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        opened = open_coded(checkpoint)
        assert opened.contents.container == containers[container].name
        schemes = {
            name: coded.how.scheme
            for module in opened.modules
            if not hasattr(opened.entries[module.tensor], "dtype")
            for name, coded in opened.coded(module)
        }
    assert schemes.keys() == {unit.module for unit in settled.units}
    for unit in settled.units:
        assert same_storage(schemes[unit.module], unit.how.scheme), unit.module
    convert(tmp_path / "c", tmp_path / "plain", "plain")
    check_plain(tmp_path, model, settled, preset, chosen)
    check_round_trip(tmp_path, container)


def check_plain(tmp_path: Path, model: Path, settled: Any, preset: str, chosen: dict[str, Any]) -> None:
    """Plain values equal those of the compressed-tensors file of the same schemes; nothing is lost."""
    settled_ct = plan(model, tmp_path / "ct", preset, **chosen)
    run(settled_ct)
    convert(tmp_path / "ct", tmp_path / "plain_ct", "plain")
    alike = {
        a.module: same_storage(a.how.scheme, b.how.scheme)
        for a, b in zip(settled.units, settled_ct.units, strict=True)
    }
    with Checkpoint.open(tmp_path / "plain") as ours, Checkpoint.open(tmp_path / "plain_ct") as theirs:
        assert "quantization_config" not in (ours.config or {})
        values, wanted = logical(ours), logical(theirs)
        assert values.keys() == wanted.keys()
        for name, value in values.items():
            if alike.get(name.removesuffix(".weight"), True):
                assert np.array_equal(value, wanted[name]), name


def logical(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every tensor, stacks of experts taken apart, so that stacked and separate layouts compare."""
    opened = open_coded(checkpoint)
    stacks = {module.tensor: module for module in opened.modules if module.experts is not None}
    found: dict[str, Any] = {}
    for name in checkpoint.entries:
        array = checkpoint.array(name)
        if name not in stacks:
            found[name] = array
            continue
        for split in stacks[name].splits():
            matrix = array[split.expert] if stacks[name].orientation == "out_in" else array[split.expert].T
            found[f"{split.name}.weight"] = matrix[split.part.start : split.part.stop : split.part.step]
    biases = [name for name in found if name.endswith("_proj_bias")]
    for name in biases:
        module = stacks.get(name.removesuffix("_bias"))
        if module is not None:
            stacked = found.pop(name)
            for split in module.splits():
                found[f"{split.name}.bias"] = stacked[split.expert][
                    split.part.start : split.part.stop : split.part.step
                ]
    return found


def check_round_trip(tmp_path: Path, container: str) -> None:
    """Through compressed-tensors and back: the same bytes in every shard, the same quantization_config."""
    if container == CT:
        return
    convert(tmp_path / "c", tmp_path / "there", CT)
    convert(tmp_path / "there", tmp_path / "back", container)
    for shard in sorted((tmp_path / "c").glob("*.safetensors")):
        assert (tmp_path / "back" / shard.name).read_bytes() == shard.read_bytes(), shard.name
    before, after = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("c", "back"))
    assert before == after


def test_a_container_says_what_it_can_hold() -> None:
    for container in WRITTEN:
        spelled = [preset for preset in toys.PRESETS if claims(container, preset)]
        assert spelled, container
        for preset in set(toys.PRESETS) - set(spelled):
            row = containers[container]
            assert row.spelling is not None
            with pytest.raises(UsageError) as refused:
                row.spelling(presets[preset].linear, BF16)
            assert refused.value.wanted, (container, preset)


def test_coded_matrices_are_read_from_any_row(tmp_path: Path) -> None:
    """Blocks of 128 rows: rows that begin inside a block decode to the same values."""
    model = toys.llama(tmp_path / "m", hidden=192, inner=544, layers=1)
    run(plan(model, tmp_path / "c", "fp8_block"))
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        opened = open_coded(checkpoint)
        module = next(m for m in opened.modules if m.name.endswith("gate_proj"))
        [(_, coded)] = opened.coded(module)
        assert isinstance(coded, Coded)
        whole = coded.read(checkpoint, np.dtype("<f4"), 0, 544)
        for start, stop in ((0, 1), (127, 129), (200, 544), (543, 544)):
            assert np.array_equal(coded.read(checkpoint, np.dtype("<f4"), start, stop), whole[start:stop])
