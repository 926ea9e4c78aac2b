"""What a walk refuses and what it says: names, shapes, tensors left over, token ids; and the memory it shares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from narrowcast.cli import main
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.runtime.experts import Experts
from narrowcast.runtime.outer import Head
from narrowcast.runtime.walk import Running
from runtime.families import MOE, SIZES, logits, reference, saved, tokens, walked


def change(folder: Path, **config: Any) -> Path:
    """The folder with another config.json; None takes a key away."""
    path = folder / "config.json"
    said = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    return folder


def with_tensors(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The folder with other tensors; None takes one away. Dots are written as two underscores."""
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, value in tensors.items():
        held.pop(name.replace("__", "."), None)
        if value is not None:
            held[name.replace("__", ".")] = value
    save_file(held, path, metadata={"format": "pt"})
    return folder


def test_tensors_that_nothing_takes_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with_tensors(tmp_path, model__layers__0__self_attn__q_proj__lora_A=torch.ones(4, 4))
    with Running.open(tmp_path, "float32") as run:
        assert run.unused == ("model.layers.0.self_attn.q_proj.lora_A",)
        assert "lora_A" in run.notes[0]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, "1 of the model's tensors are not in this checkpoint"),
        (torch.ones(64, 16), "model.layers.2.mlp.up_proj does not fit the model"),
        (torch.full((64, 32), float("nan")), "model.layers.2.mlp.up_proj holds NaN or infinity"),
    ],
)
def test_tensors_that_cannot_be_right(tmp_path: Path, tensor: torch.Tensor | None, said: str) -> None:
    with_tensors(saved("llama", tmp_path), model__layers__2__mlp__up_proj__weight=tensor)
    with pytest.raises(CheckpointError, match=said), Running.open(tmp_path, "float32") as run:
        walked(run, tokens(4))


def test_weights_beyond_the_dtype_of_the_run_are_told_from_infinity(tmp_path: Path) -> None:
    large = torch.zeros(64, 32)
    large[3, 5] = -70000.0
    with_tensors(saved("llama", tmp_path), model__layers__2__mlp__up_proj__weight=large)
    said = r"up_proj overflows float16(.|\n)*1 of 2048 elements beyond it, amax 70000(.|\n)*at most 65504"
    with pytest.raises(CheckpointError, match=said), Running.open(tmp_path, "float16") as run:
        walked(run, tokens(4))


def test_a_transposed_square_matrix_is_not_taken_as_it_lies(tmp_path: Path) -> None:
    """GPT-2's attention output is square and stored [in, out]: shape alone would not tell."""
    saved("gpt2-learned-positions", tmp_path)
    with Running.open(tmp_path, "float32") as run:
        layer: Any = run.layer(0)
        stored = load_file(tmp_path / "model.safetensors")["transformer.h.0.attn.c_proj.weight"]
        assert torch.equal(layer.attn.c_proj.weight.matrix, stored.T)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": None, "architectures": None}, "names no model_type"),
        ({"model_type": "later_than_this"}, "transformers has no model of this type"),
        (
            {"model_type": "later_than_this", "auto_map": {"AutoModelForCausalLM": "m.M"}},
            "brings its own code",
        ),
        ({"model_type": "clip"}, "no causal language model of this type"),
    ],
)
def test_models_that_transformers_has_not(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    change(saved("llama", tmp_path), **config)
    with pytest.raises(UsageError, match=said):
        Running.open(tmp_path, "float32")


def test_code_in_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    """A family that transformers knows runs by transformers' own code, whatever lies beside the weights."""
    change(saved("llama", tmp_path), auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('was run')")
    with Running.open(tmp_path, "float32") as run:
        assert type(run.model).__module__.startswith("transformers.models.llama")


@pytest.mark.parametrize("ids", [[1, 97], [-1, 2], []])
def test_token_ids_outside_the_vocabulary(tmp_path: Path, ids: list[int]) -> None:
    with Running.open(saved("llama", tmp_path), "float32") as run, pytest.raises(UsageError, match="token"):
        run.begin(torch.tensor(ids, dtype=torch.int64))


def test_texts_longer_than_the_positions(tmp_path: Path) -> None:
    with Running.open(saved("llama", tmp_path / "a"), "float32") as run:
        walked(run, tokens(65))
        assert run.notes == ["a text is longer than the 64 positions that the config names"]
    said = "longer than the model has positions"
    learned = saved("gpt2-learned-positions", tmp_path / "b")
    with Running.open(learned, "float32") as run, pytest.raises(UsageError, match=said):
        walked(run, tokens(65))


def test_experts_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = t.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=4, intermediate_size_mlp=64)
    t.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="the experts of this family cannot be run"):
        Running.open(tmp_path, "float32")


def test_conversions_that_compute_are_refused(tmp_path: Path) -> None:
    """A family that stores fused projections which transformers splits: never taken under a name that fits."""
    config = t.AutoConfig.for_model("sarvam_moe", **SIZES, **MOE, head_dim=8)
    t.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"transformers computes with .*query_key_value"):
        Running.open(tmp_path, "float32")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_model(tmp_path: Path, prefix: str) -> None:
    alone = saved("gemma3", tmp_path / "text")
    said = json.loads((alone / "config.json").read_text())
    held = load_file(alone / "model.safetensors")
    whole = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in held.items()}
    whole["vision_tower.patches.weight"] = torch.ones(4, 4)
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": said,
    }
    (tmp_path / "whole" / "config.json").write_text(json.dumps(outer))
    with Running.open(tmp_path / "whole", "float32") as run:
        assert run.unused == ("vision_tower.patches",)
        assert torch.equal(walked(run, tokens(24)), logits(reference(alone), tokens(24)))


def test_a_tied_head_reads_the_embedding(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        with Running.open(saved("qwen2-tied", tmp_path / dtype), dtype) as run:
            run.begin(tokens(3))
            head = run.model.lm_head
            assert isinstance(head, Head)
            assert head.narrow.data_ptr() == run.model.model.embed_tokens.weight.data_ptr()
            assert head.narrow.dtype == run.dtype


def test_a_head_in_pieces_sums_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Running.open(saved("llama", tmp_path, torch.bfloat16, exact=True)) as run:
        whole = walked(run, tokens(12))
        monkeypatch.setattr("narrowcast.runtime.outer.ROWS", 32)
        assert torch.equal(walked(run, tokens(12)), whole)


def test_layers_and_whole_models_share_the_skeleton(tmp_path: Path) -> None:
    """What a layer is filled with is its own; the skeleton stays empty, and a whole model keeps one embedding."""
    with Running.open(saved("llama", tmp_path), "float32") as run:
        run.begin(tokens(3))
        whole = run.resident()
        embedding = run.model.model.embed_tokens.weight
        assert whole.model.embed_tokens.weight.data_ptr() == embedding.data_ptr()
        assert all(parameter.is_meta for parameter in run.layers.parameters())
        assert torch.equal(logits(whole, tokens(9)), walked(run, tokens(9)))


def test_masks_are_kept_once(tmp_path: Path) -> None:
    """[T, T] masks: of all layers, of texts of one length, and of shorter texts as corners."""
    with Running.open(saved("gemma2", tmp_path), "float32") as run:
        states = [run.begin(tokens(count)) for count in (40, 40, 24)]
        masks = {
            call["attention_mask"].untyped_storage().data_ptr() for state in states for call in state.calls
        }
        assert len(masks) == 2  # a full and a sliding one
        for i in range(run.depth):
            layer = run.layer(i)
            for state in states:
                run.step(layer, i, state)
        assert torch.equal(run.logits(states[2]), logits(reference(tmp_path), tokens(24)))


def test_tokens_are_counted_by_expert(tmp_path: Path) -> None:
    with Running.open(saved("qwen3-moe", tmp_path), "float32") as run:
        layer: Any = run.layer(0)
        run.step(layer, 0, run.begin(tokens(24)))
        assert isinstance(layer.mlp.experts, Experts)
        assert int(layer.mlp.experts.tokens.sum()) == 24 * 2


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "phi3-fused-window", "gemma2"])
@pytest.mark.parametrize("preset", ["fp8_dynamic", "fp8_block", "int8", "nvfp4a16"])
def test_quantized_forms_run_near_their_parent(tmp_path: Path, name: str, preset: str) -> None:
    """No divergence beyond that of a model that knows nothing: weights came to the right places."""
    parent = saved(name, tmp_path / "parent", torch.bfloat16)
    assert main(["quantize", str(parent), str(tmp_path / "child"), "--preset", preset, "--quiet"]) == 0
    with Running.open(parent) as run:
        p = walked(run, tokens(24)).log_softmax(-1)
    with Running.open(tmp_path / "child") as run:
        assert run.unused == ()
        q = walked(run, tokens(24)).log_softmax(-1)
    assert q.isfinite().all()
    uniform = float((p.exp() * p).sum(-1).mean()) + torch.log(torch.tensor(97.0))
    assert float((p.exp() * (p - q)).sum(-1).mean()) < uniform


MEASURE = """
import sys, torch
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.walk import Running
from narrowcast.texts.documents import Piece
torch.set_num_threads(1)
run = Running.open(sys.argv[1], "float32")
pieces = [Piece(0, "text", 0, tuple(i % 97 for i in range(32)))]
for row in together([Lane("a", run)], pieces):
    assert row[0].isfinite().all()
print(next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from Linux's /proc")
def test_the_peak_does_not_grow_with_depth(tmp_path: Path) -> None:
    """Twelve layers more cost less memory than one of them takes in float32."""
    peaks, parameters = [], 0
    for depth in (4, 16):
        config = t.LlamaConfig(
            **{**SIZES, "num_hidden_layers": depth, "hidden_size": 1024, "intermediate_size": 2816}
        )
        model = t.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        parameters = sum(one.numel() for one in model.model.layers[0].parameters())
        model.save_pretrained(tmp_path / str(depth))
        asked = [sys.executable, "-c", MEASURE, str(tmp_path / str(depth))]
        peaks.append(int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] - peaks[0] < 4 * parameters


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with Running.open(tmp_path) as run, pytest.raises(CheckpointError, match="generation_config"):
        run.resident()
