"""Cases of the rules about files: shards, index, configs as texts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from audit.asking import Ask, Case
from audit.editing import edit_config, parent, quantized
from narrowcast.store.folder import INDEX

LAST = "model-00003-of-00003.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"


def other_block(folder: Path) -> Ask:
    model = quantized(folder, "fp8_block", "fp8")
    edit_config(model, lambda config: config["quantization_config"].update(weight_block_size=[64, 64]))
    return Ask(model, expect={"severity": "error"})


def whole(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_block", "fp8"))


def cut_off(folder: Path) -> Ask:
    model = quantized(folder, "fp8_dynamic")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return Ask(model, expect={"severity": "error", "tensor": "model.safetensors"})


def sharded(folder: Path) -> Path:
    """A plain Llama in three shards, healthy."""
    return parent(folder, shards=3)


def healthy(folder: Path) -> Ask:
    return Ask(sharded(folder))


def pointer(folder: Path) -> Ask:
    model = sharded(folder)
    (model / LAST).write_bytes(LFS)
    return Ask(model, expect={"tensor": LAST, "got": "first bytes b'version http', standing for 1234 bytes"})


def link_to_nothing(folder: Path) -> Ask:
    model = sharded(folder)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("../blobs/0123")
    return Ask(model, expect={"tensor": "tokenizer.json", "got": "../blobs/0123"})


def link_to_file(folder: Path) -> Ask:
    model = sharded(folder)
    (model / "tokenizer.json").rename(folder / "blob")
    (model / "tokenizer.json").symlink_to("../blob")
    return Ask(model)


def shard_gone(folder: Path) -> Ask:
    model = sharded(folder)
    count = sum(shard == LAST for shard in read_index(model)["weight_map"].values())
    (model / LAST).unlink()
    return Ask(model, expect={"tensor": LAST, "count": count})


def read_index(model: Path) -> dict:
    return json.loads((model / INDEX).read_text())


def reindex(model: Path, change) -> Path:
    return edit_config(model, change, INDEX)


def broken_config(folder: Path) -> Ask:
    model = sharded(folder)
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text[: len(text) // 2])
    return Ask(model, expect={"tensor": "config.json", "severity": "error"})


def twice(folder: Path) -> Ask:
    model = sharded(folder)
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace("{", '{"hidden_size": 96,', 1))
    return Ask(model, expect={"said": "the key 'hidden_size' appears twice", "tensor": "config.json"})


def marked(folder: Path) -> Ask:
    model = sharded(folder)
    (model / "config.json").write_bytes(b"\xef\xbb\xbf" + (model / "config.json").read_bytes())
    return Ask(model, expect={"tensor": "config.json", "got": "ef bb bf"})


def text_for_number(folder: Path) -> Ask:
    model = edit_config(sharded(folder), lambda config: config.update(hidden_size="128"))
    return Ask(model, expect={"tensor": "config.json", "got": "'128'"})


def no_type(folder: Path) -> Ask:
    model = edit_config(sharded(folder), lambda config: config.pop("model_type"))
    return Ask(model, expect={"said": "model_type is missing", "severity": "error"})


def no_config(folder: Path) -> Ask:
    model = sharded(folder)
    (model / "config.json").unlink()
    return Ask(model, expect={"severity": "error"})


def listed_only(folder: Path) -> Ask:
    model = reindex(sharded(folder), lambda index: index["weight_map"].update({"lm_head.weight": LAST}))
    return Ask(model, expect={"tensor": LAST, "count": 1, "got": f"{LAST} without lm_head.weight"})


def unlisted(folder: Path) -> Ask:
    model = reindex(sharded(folder), lambda index: index["weight_map"].pop("model.norm.weight"))
    return Ask(model, expect={"count": 1, "repair": "index", "got": "model.norm.weight"})


def elsewhere(folder: Path) -> Ask:
    model = reindex(sharded(folder), lambda index: index["weight_map"].update({"model.norm.weight": LAST}))
    return Ask(model, expect={"tensor": LAST, "count": 1, "repair": "index"})


def other_size(folder: Path) -> Ask:
    model = sharded(folder)
    size = read_index(model)["metadata"]["total_size"]
    reindex(model, lambda index: index["metadata"].update(total_size=size + 2))
    return Ask(model, expect={"got": f"{size + 2} bytes", "wanted": f"{size} bytes", "severity": "info"})


def no_index(folder: Path) -> Ask:
    (sharded(folder) / INDEX).unlink()
    return Ask(folder / "parent", expect={"repair": "index", "severity": "error"})


def doubled(folder: Path) -> Ask:
    """A shard of another save, under a name that the index lists for one line."""
    model = sharded(folder)
    shutil.copy(model / LAST, model / "more.safetensors")
    own = [name for name, shard in read_index(model)["weight_map"].items() if shard == LAST]
    reindex(model, lambda index: index["weight_map"].update({own[0]: "more.safetensors"}))
    return Ask(model, expect={"count": len(own)})


def by_case(folder: Path) -> Ask:
    model = sharded(folder)
    shutil.copy(model / "tokenizer.json", model / "Tokenizer.json")
    return Ask(model, expect={"tensor": "tokenizer.json", "got": "Tokenizer.json"})


def second_copy(folder: Path) -> Ask:
    model = parent(folder)
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    return Ask(model, expect={"severity": "warning", "tensor": "consolidated.safetensors"})


def stray(folder: Path) -> Ask:
    model = sharded(folder)
    shutil.copy(model / LAST, model / "old.safetensors")
    return Ask(model, expect={"tensor": "old.safetensors", "severity": "error"})


def leftover(folder: Path) -> Ask:
    model = sharded(folder)
    (model / f"{LAST}.incomplete").write_bytes(b"x")
    return Ask(model, expect={"tensor": f"{LAST}.incomplete", "count": 1})


def hidden_leftover(folder: Path) -> Ask:
    """A cache of the downloader in a hidden folder is none of the model's files."""
    model = sharded(folder)
    os.makedirs(model / ".cache/huggingface")
    (model / ".cache/huggingface/x.incomplete").write_bytes(b"x")
    return Ask(model)


CASES = {
    "NC001": Case(other_block, whole),
    "NC002": Case(cut_off, whole),
    "NC003": Case(pointer, healthy),
    "NC004": Case(link_to_nothing, link_to_file),
    "NC005": Case(shard_gone, healthy),
    "NC006": Case(broken_config, healthy),
    "NC007": Case(twice, healthy),
    "NC008": Case(marked, healthy),
    "NC009": Case(no_config, healthy),
    "NC010": Case(listed_only, healthy),
    "NC011": Case(unlisted, healthy),
    "NC012": Case(elsewhere, healthy),
    "NC013": Case(other_size, healthy),
    "NC014": Case(no_index, healthy),
    "NC015": Case(doubled, healthy),
    "NC016": Case(by_case, healthy),
    "NC017": Case(text_for_number, healthy),
    "NC018": Case(no_type, healthy),
    "NC020": Case(second_copy, healthy),
    "NC021": Case(stray, healthy),
    "NC022": Case(leftover, hidden_leftover),
}
