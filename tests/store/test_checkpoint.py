"""Directories that hold a checkpoint, and every way in which their parts can contradict each other."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from narrowcast.errors import CheckpointError, HeaderError, InputError, UsageError
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import read_object

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def matrix(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)


@pytest.fixture
def single(tmp_path) -> Path:
    """One file, tied embeddings, a tokenizer."""
    save_file(
        {"model.embed_tokens.weight": matrix(0), "model.norm.weight": matrix(1)},
        tmp_path / "model.safetensors",
    )
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Two shards and their index."""
    first = {"model.embed_tokens.weight": matrix(0), "model.layers.0.w": matrix(1)}
    second = {"model.layers.1.w": matrix(2), "lm_head.weight": matrix(3)}
    table = {}
    for shard, tensors in zip(SHARDS, (first, second), strict=True):
        save_file(tensors, tmp_path / shard, {"format": "pt", "shard": shard})
        table |= dict.fromkeys(tensors, shard)
    write_index(tmp_path, table)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": false}'
    )
    return tmp_path


def write_index(folder: Path, table: object, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 512}, "weight_map": table}))


def table_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refused(folder: Path, *says: str, kind: type[InputError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    for words in says:
        assert words in message, message
    return message


def test_a_single_file_directory(single) -> None:
    with Checkpoint.open(single) as checkpoint:
        assert checkpoint.root == single
        assert checkpoint.shards == (single / "model.safetensors",)
        assert checkpoint.index is None
        assert checkpoint.config_bytes == (single / "config.json").read_bytes()
        assert checkpoint.config == json.loads(checkpoint.config_bytes)
        assert checkpoint.side_files == (Path("tokenizer.json"),)
        assert checkpoint.foreign_weights == ()
        assert checkpoint.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
        assert np.array_equal(checkpoint.array("model.norm.weight"), matrix(1))


def test_one_file_is_read(single) -> None:
    with Checkpoint.open(single / "model.safetensors") as checkpoint:
        assert checkpoint.config is None
        assert np.array_equal(checkpoint.array("model.norm.weight"), matrix(1))


def test_shards_read_through_one_face(sharded) -> None:
    with Checkpoint.open(str(sharded)) as checkpoint:
        assert [shard.name for shard in checkpoint.shards] == list(SHARDS)
        assert checkpoint.tied == ()
        assert checkpoint.metadata == {shard: {"format": "pt", "shard": shard} for shard in SHARDS}
        for shard in SHARDS:
            for name, value in load_file(sharded / shard).items():
                assert checkpoint.entries[name].path == sharded / shard
                assert np.array_equal(checkpoint.array(name), value)
                assert np.array_equal(checkpoint.rows(name, 1, 3), value[1:3])
                buffer = np.empty(8, np.float32)
                checkpoint.read_into(name, buffer, 32)
                assert np.array_equal(buffer, value[1])
        checkpoint.release()
        assert checkpoint.reader(sharded / SHARDS[0]) is checkpoint.reader(sharded / SHARDS[0])
        with pytest.raises(
            UsageError, match=r"no tensor 'lm_head.weigt'(.|\n)*did you mean lm_head.weight\?"
        ):
            checkpoint.entry("lm_head.weigt")


def test_a_file_alone(sharded) -> None:
    with Checkpoint.open(sharded / SHARDS[1]) as checkpoint:
        assert checkpoint.config is None
        assert checkpoint.config_bytes is None
        assert set(checkpoint.entries) == {"model.layers.1.w", "lm_head.weight"}
        assert checkpoint.side_files == ()


def test_relative_paths(single, monkeypatch) -> None:
    monkeypatch.chdir(single.parent)
    with Checkpoint.open(single.name) as checkpoint:
        monkeypatch.chdir("/")
        assert checkpoint.root == single
        assert checkpoint.array("model.norm.weight").shape == (4, 8)


def test_a_hub_cache_of_symlinks(sharded, tmp_path_factory) -> None:
    cache = tmp_path_factory.mktemp("hub")
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    with Checkpoint.open(snapshot) as checkpoint:
        assert len(checkpoint.entries) == 4
        assert np.array_equal(checkpoint.array("lm_head.weight"), matrix(3))
    (blobs / "2").unlink()
    refused(snapshot, "symlink to nothing")


def test_side_files_and_foreign_weights(single) -> None:
    side = [
        ".gitattributes", "README.md", "chat_template.jinja", "generation_config.json", "modeling_x.py",
        "1_Pooling/config.json", "2_Dense/model.safetensors", "custom/deep/code.py", "training_args.bin",
        "preprocessor_config.json", "voice.pt",
    ]  # fmt: skip
    foreign = [
        "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
        "consolidated.00.pth", "consolidated.safetensors", "model-Q4_K_M.gguf", "onnx/model.onnx",
        "original/model.safetensors", "model.safetensors.tmp", "x.bin.incomplete",
        "original/consolidated.00.pth", "tf_model.h5", "flax_model.msgpack", "adapter_model.safetensors",
        "original/model.safetensors.index.json",
    ]  # fmt: skip
    hidden = [".git/config", ".cache/huggingface/x.metadata", "custom/.ipynb/x.py"]
    for name in (*side, *foreign, *hidden):
        (single / name).parent.mkdir(parents=True, exist_ok=True)
        (single / name).write_bytes(b"x")
    with Checkpoint.open(single) as checkpoint:
        assert set(map(str, checkpoint.side_files)) == {*side, "tokenizer.json"}
        assert set(map(str, checkpoint.foreign_weights)) == set(foreign)
        assert list(checkpoint.side_files) == sorted(checkpoint.side_files)


def test_symlinked_folders_are_followed_once(single) -> None:
    (single / "extra").mkdir()
    (single / "extra" / "a.txt").write_text("a")
    (single / "loop").symlink_to(single)
    outside = single.parent / (single.name + "-outside")
    outside.mkdir()
    (outside / "b.txt").write_text("b")
    (single / "linked").symlink_to(outside)
    with Checkpoint.open(single) as checkpoint:
        assert set(map(str, checkpoint.side_files)) == {"tokenizer.json", "extra/a.txt", "linked/b.txt"}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, ["directory is empty"]),
        ({"model-q4.gguf": b"GGUF"}, ["no safetensors", "model-q4.gguf", "original safetensors"]),
        (
            {"pytorch_model.bin": b"PK", "config.json": b"{}"},
            ["no safetensors", "pytorch_model.bin", "save_pretrained"],
        ),
        ({"consolidated.00.pth": b"PK"}, ["no safetensors", "consolidated.00.pth"]),
        ({"notes.txt": b"x", "config.json": b"{}"}, ["no safetensors", "notes.txt", "directory that holds"]),
        ({"sub/model.safetensors": b"x"}, ["no safetensors", "sub/model.safetensors"]),
    ],
)
def test_directories_without_weights(tmp_path, files, says) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    refused(tmp_path, str(tmp_path), *says)


def test_names_of_nothing(tmp_path, monkeypatch) -> None:
    with pytest.raises(UsageError, match="no such model"):
        Checkpoint.open(tmp_path / "gone")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"hub did not give this model(.|\n)*local directory"):
        Checkpoint.open("nobody-here/no-such-model")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"need the package huggingface_hub(.|\n)*pip install"):
        Checkpoint.open("nobody-here/no-such-model")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "not json", '{"a": 1, "a": 2}', "\x00", '{"a": ' + "[" * 100_000]
)
def test_a_config_that_is_no_object(single, text) -> None:
    (single / "config.json").write_text(text)
    refused(single, "config.json is not a JSON object", str(single / "config.json"))


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_object(tmp_path / "config.json")


def test_a_config_with_infinity_is_read(single) -> None:
    (single / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    with Checkpoint.open(single) as checkpoint:
        assert checkpoint.config == {"time_step_limit": [0.0, float("inf")]}


def test_a_missing_config(single) -> None:
    (single / "config.json").unlink()
    refused(single, "config.json is missing", "give one .safetensors file")


def test_a_shard_cut_short(sharded) -> None:
    shard = sharded / SHARDS[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    refused(
        sharded,
        SHARDS[1],
        "cut short",
        f"{len(content) - 7} bytes",
        f"{len(content)} bytes",
        kind=HeaderError,
    )


def test_a_pickle_that_is_called_safetensors(single) -> None:
    (single / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(single, "zip archive", kind=HeaderError)


def test_a_missing_shard(sharded) -> None:
    (sharded / SHARDS[1]).unlink()
    refused(sharded, "1 of 2 shards are missing", SHARDS[1], "download")


def test_a_stray_shard(sharded) -> None:
    save_file({"x": matrix(9)}, sharded / "extra.safetensors")
    refused(sharded, "the index does not know", "extra.safetensors", "remove the file")


def test_model_safetensors_beside_an_index(sharded) -> None:
    save_file({"x": matrix(9)}, sharded / "model.safetensors")
    refused(sharded, "the index does not know", "model.safetensors")


def test_an_index_name_without_a_tensor(sharded) -> None:
    write_index(sharded, table_of(sharded) | {"ghost.weight": SHARDS[0], "ghost.bias": SHARDS[0]})
    refused(sharded, "lists 2 tensors that no shard has", "'ghost.weight'", SHARDS[0])


def test_a_tensor_without_an_index_name(sharded) -> None:
    table = table_of(sharded)
    del table["lm_head.weight"]
    write_index(sharded, table)
    refused(sharded, "1 tensors that the index does not list", "'lm_head.weight'", SHARDS[1])


def test_a_tensor_in_another_shard_than_indexed(sharded) -> None:
    write_index(sharded, table_of(sharded) | {"lm_head.weight": SHARDS[0]})
    refused(sharded, "'lm_head.weight' is in another shard", f"got: {SHARDS[1]}", f"wanted: {SHARDS[0]}")


def test_a_tensor_in_two_shards(sharded) -> None:
    save_file(
        {"model.layers.1.w": matrix(2), "lm_head.weight": matrix(3), "model.layers.0.w": matrix(1)},
        sharded / SHARDS[1],
    )
    refused(sharded, "'model.layers.0.w' is in two shards", SHARDS[0], SHARDS[1])


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 3, None, ""]
)
def test_an_index_that_points_elsewhere(sharded, shard) -> None:
    write_index(sharded, table_of(sharded) | {"lm_head.weight": shard})
    refused(sharded, "'lm_head.weight'", "no shard of this directory", repr(shard))


@pytest.mark.parametrize("table", [None, [], {}, "x"])
def test_an_index_without_a_table(sharded, table) -> None:
    write_index(sharded, table)
    refused(sharded, "no weight_map", INDEX)


@pytest.mark.parametrize("closed", ["sub", "config.json", "model.safetensors", ""])
def test_what_cannot_be_read_is_named(single, closed) -> None:
    """Read by somebody else in a process of its own; a folder that cannot be listed is not an empty folder."""
    (single / "sub").mkdir()
    (single / "sub" / "code.py").write_text("x")
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        model = Path(shutil.copytree(single, Path(open_to_all) / "model"))
        model.chmod(0o755)
        (model / closed).chmod(0)
        child = os.fork()
        if child == 0:
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                refused(model, "cannot be read", "Permission denied", str(model / closed), kind=InputError)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        (model / closed).chmod(0o755)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {"a": "b", "a": "c"}}'])
def test_an_index_that_is_no_object(sharded, text) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, f"{INDEX} is not a JSON object")


def test_shards_without_their_index(sharded) -> None:
    (sharded / INDEX).unlink()
    with Checkpoint.open(sharded) as checkpoint:  # a complete family needs no index
        assert len(checkpoint.entries) == 4
        assert checkpoint.index is None
    (sharded / SHARDS[1]).unlink()
    refused(sharded, "1 of 2 shards are missing", "parts 2 of 2")


def test_unrelated_files_without_an_index(sharded) -> None:
    (sharded / INDEX).unlink()
    save_file({"x": matrix(9)}, sharded / "other.safetensors")
    refused(sharded, "several weight files and no index", "other.safetensors")


def test_another_index_name(sharded) -> None:
    table = table_of(sharded)
    (sharded / INDEX).unlink()
    write_index(sharded, table, "diffusion_pytorch_model.safetensors.index.json")
    with Checkpoint.open(sharded) as checkpoint:
        assert checkpoint.index is not None
        assert checkpoint.side_files == ()
    write_index(sharded, table, "other.safetensors.index.json")
    refused(sharded, "several indexes", INDEX)


@pytest.mark.parametrize(
    ("config", "heads", "tied"),
    [
        ({"tie_word_embeddings": True}, [], True),
        ({"tie_word_embeddings": True}, ["lm_head.weight"], True),
        ({"tie_word_embeddings": False}, [], False),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, [], True),
        (
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            ["lm_head.weight"],
            False,
        ),
        ({"architectures": ["Gemma2ForCausalLM"]}, [], True),
        ({"architectures": ["GPT2LMHeadModel"]}, [], True),
        ({"architectures": ["LlamaForCausalLM"]}, ["lm_head.weight"], False),
        ({"architectures": ["BertModel"]}, [], False),
        ({"architectures": None, "text_config": None}, [], False),
    ],
)
def test_tied_heads(tmp_path, config, heads, tied) -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.61.embed_tokens.weight",
        "model.attention.output.weight",
    ]
    save_file({name: matrix(0) for name in names + heads}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tied == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())
