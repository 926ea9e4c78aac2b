"""Tokenizers through GGUF metadata and back, against llama.cpp, transformers and the tokenizers package."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo.source import smollm2_gguf
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.model.gguf_tokenizer import CUTS, tokenizer_files
from narrowcast.model.gguf_vocabulary import vocabulary_fields
from narrowcast.store.gguf import GGUFFile
from narrowcast.store.gguf_writer import gguf_writer

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers/bin/python"
needs_llama_cpp = pytest.mark.skipif(
    not list(ROOT.glob(".venv-peers/lib/python3*/site-packages/llama_cpp")),
    reason="needs .venv-peers with llama-cpp-python (make .venv-peers/.installed)",
)
AT = "tokenizer.ggml."
TEXTS = [
    "Hello world", " leading", "  two", "a\nb\n\nc\t d", "123456 7.89 1234567", "I'll don't WE'RE She'D", "", " ",
    "Größe 中文 日本語 🦙🦙", "<|im_start|>user\nhi<|im_end|>\n", "x  y   z", "end ", "\n", "HelloWorld ABCdef", "   ",
    "\r\n\r\n x \n\n ", "½ ² Ⅷ é", "'S 'ſ don'T", "!!!???  ...\n#", "नमस्ते ไทย العربية", "<unk> </s> [INST]",
    "a/b//c\n/d",
]  # fmt: skip


@cache
def smollm2() -> dict[str, Any]:
    with GGUFFile(smollm2_gguf()) as file:
        return dict(file.fields)


def saved(files: Mapping[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def loaded(fields: Mapping[str, Any]) -> Any:
    return Tokenizer.from_str(tokenizer_files(fields)["tokenizer.json"].decode())


def same(one: Any, two: Any) -> bool:
    return bool(np.array_equal(np.asarray(one), np.asarray(two)))


def ask_llama_cpp(jobs: list[dict[str, Any]]) -> Any:
    script = Path(__file__).with_name("gguf_llama_cpp.py")
    done = subprocess.run(
        [PEERS, script, "tokenize"], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def vocabulary_file(path: Path, fields: Mapping[str, Any]) -> str:
    with gguf_writer(path, [], fields) as writer:
        writer.finish()
    return str(path)


def test_the_real_tokenizer_answers_as_the_one_that_the_demo_rebuilds(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    ours = AutoTokenizer.from_pretrained(saved(tokenizer_files(smollm2()), tmp_path))
    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids)
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")


def test_the_real_metadata_come_back(tmp_path: Path) -> None:
    back = vocabulary_fields(saved(tokenizer_files(smollm2()), tmp_path), {"vocab_size": 49152})
    for key, value in smollm2().items():
        if key.startswith("tokenizer.") and not key.endswith(
            "add_space_prefix"
        ):  # which byte-level BPE ignores
            assert same(back[key], value), key


def test_patterns_are_those_of_transformers() -> None:
    for name, cut in CUTS.items():
        assert GGUF_PRE_TOKENIZER_SPLITS.get(name) == cut.pattern


@cache
def part_of_smollm2() -> dict[str, Any]:
    """The first tokens of the real vocabulary, with the merges among them."""
    fields, size = smollm2(), 4000
    tokens = fields[AT + "tokens"][:size]
    inside = set(tokens)
    merges = [
        merge for merge in fields[AT + "merges"] if {*merge.split(" "), merge.replace(" ", "")} <= inside
    ]
    return fields | {
        AT + "tokens": tokens,
        AT + "merges": merges,
        AT + "token_type": fields[AT + "token_type"][:size],
    }


def with_cut(name: str) -> dict[str, Any]:
    fields = part_of_smollm2() | {AT + "pre": name, AT + "add_bos_token": False}
    del fields[AT + "add_space_prefix"]
    return fields


@pytest.mark.parametrize("name", CUTS)
def test_the_name_of_a_cut_is_found_again(name: str, tmp_path: Path) -> None:
    fields = with_cut(name)
    back = vocabulary_fields(saved(tokenizer_files(fields), tmp_path), {"vocab_size": 4000})
    first_alike = next(other for other, cut in CUTS.items() if cut == CUTS[name])
    assert back[AT + "pre"] in (name, first_alike, "qwen2")
    assert (
        loaded(with_cut(back[AT + "pre"])).encode("A'll 123 ß").ids == loaded(fields).encode("A'll 123 ß").ids
    )


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_cuts_text_alike(tmp_path: Path) -> None:
    jobs = [
        {"model": vocabulary_file(tmp_path / f"{name}.gguf", with_cut(name)), "texts": TEXTS} for name in CUTS
    ]
    for name, answer in zip(CUTS, ask_llama_cpp(jobs), strict=True):
        tokenizer = loaded(with_cut(name))
        for text, ids in zip(TEXTS, answer, strict=True):
            assert tokenizer.encode(text).ids == ids, (name, text)


def piece_tokenizer(prefix: bool = True) -> dict[str, Any]:
    """A tokenizer.json of BPE with byte fallback, trained on the words of this file."""
    tokenizer = Tokenizer(models.BPE())
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [line for line in Path(__file__).read_text().splitlines() if line]
    tokenizer.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]
    made["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    names = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": piece,
        "pair": piece,
        "special_tokens": names,
    }
    return made


SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "unk_token": "<unk>",
    "chat_template": "{{ x }}",
}


def piece_folder(folder: Path, made: dict[str, Any]) -> Path:
    files = {
        "tokenizer.json": json.dumps(made).encode(),
        "tokenizer_config.json": json.dumps(SETTINGS).encode(),
    }
    return saved(files, folder)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_come_back_with_the_same_ids(prefix: bool, tmp_path: Path) -> None:
    made = piece_tokenizer(prefix)
    fields = vocabulary_fields(piece_folder(tmp_path, made), {"vocab_size": 910})
    assert (fields[AT + "model"], fields[AT + "add_space_prefix"]) == ("llama", prefix)
    assert (fields[AT + "add_bos_token"], fields[AT + "add_eos_token"]) == (True, False)
    assert [fields[f"{AT}{role}_token_id"] for role in ("unknown", "bos", "eos")] == [0, 1, 2]
    assert fields[AT + "token_type"][:5] == [2, 3, 3, 6, 6]
    assert fields[AT + "tokens"][-1] == "[PAD909]"
    assert fields["tokenizer.chat_template"] == "{{ x }}"
    original, back = Tokenizer.from_str(json.dumps(made)), loaded({k: as_read(v) for k, v in fields.items()})
    for text in TEXTS:
        ids = back.encode(text).ids
        assert ids == original.encode(text).ids, text
    assert back.decode(back.encode("a  b 🦙").ids) == "a  b 🦙"


def as_read(value: Any) -> Any:
    """A value as it is read from a file: lists of numbers are arrays."""
    return np.array(value) if isinstance(value, list) and value and isinstance(value[0], int) else value


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_merges_pieces_alike(tmp_path: Path) -> None:
    jobs, wanted = [], []
    for prefix in (True, False):
        made = piece_tokenizer(prefix)
        fields = vocabulary_fields(piece_folder(tmp_path, made), {"vocab_size": 900})
        head = {"general.architecture": "llama", "llama.vocab_size": 900}
        jobs.append({"model": vocabulary_file(tmp_path / f"{prefix}.gguf", head | fields), "texts": TEXTS})
        wanted.append([Tokenizer.from_str(json.dumps(made)).encode(text).ids for text in TEXTS])
    for ours, theirs in zip(wanted, ask_llama_cpp(jobs), strict=True):
        for text, one, two in zip(TEXTS, ours, theirs, strict=True):
            assert one == two, text


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def sentencepiece_model(pieces: list[tuple[str, float, int]], kind: int = 2) -> bytes:
    body = b""
    for text, score, what in pieces:
        piece = message(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        body += message(1, piece + (varint(3 << 3) + varint(what) if what != 1 else b""))
    return body + message(2, varint(3 << 3) + varint(kind))


def test_a_sentencepiece_model_gives_its_own_scores(tmp_path: Path) -> None:
    made = piece_tokenizer()
    numbered = sorted(made["model"]["vocab"].items(), key=lambda pair: pair[1])
    kinds = [2, 3, 3, *[6] * 256]
    pieces = [(token, -0.5 * i, kinds[i] if i < len(kinds) else 1) for token, i in numbered]
    folder = piece_folder(tmp_path, made)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(pieces))
    fields = vocabulary_fields(folder, {"vocab_size": 900})
    assert fields[AT + "scores"][259:].tolist() == [np.float32(-0.5 * i) for i in range(259, 900)]
    assert fields[AT + "token_type"] == [kind for _, _, kind in pieces]
    for content, error in (
        (sentencepiece_model(pieces, 1), UsageError),
        (b"\xff" * 30, CheckpointError),
        (sentencepiece_model(pieces)[:-3], CheckpointError),
        (message(1, b""), CheckpointError),
    ):
        (folder / "tokenizer.model").write_bytes(content)
        with pytest.raises(error):
            vocabulary_fields(folder, {"vocab_size": 900})


def test_runs_of_spaces_of_gemma() -> None:
    """Stored as spaces, spelled with ▁, and merged early although their scores do not say so."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "▁", "a", "▁a", "aa"]
    kinds = [3, 3, 3, 2, 4, 4, 1, 1, 1, 1]
    fields = {
        "general.architecture": "gemma2", AT + "model": "llama", AT + "bos_token_id": 2, AT + "tokens": tokens,
        AT + "token_type": np.array(kinds), AT + "add_space_prefix": False,
        AT + "scores": np.array([0.0] * 4 + [-1000.0] * 2 + [-1.0, -2.0, -9.0, -3.0]),
    }  # fmt: skip
    made = json.loads(tokenizer_files(fields)["tokenizer.json"])
    assert made["model"]["merges"] == [["▁", "▁"], ["▁▁", "▁"], ["▁", "▁▁"], ["▁", "a"], ["a", "a"]] or made[
        "model"
    ]["merges"] == [["▁", "▁"], ["▁▁", "▁"], ["▁", "▁▁"], ["▁", "a"], ["a", "a"]]
    assert loaded(fields).encode("a  a   aa").tokens == ["<bos>", "a", "▁▁", "a", "▁▁▁", "aa"]


def test_generation_ends_where_a_turn_ends() -> None:
    files = tokenizer_files(smollm2() | {AT + "eot_token_id": 7})
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, 7]
    named = tokenizer_files(
        smollm2() | {"tokenizer.chat_template.tools": "T", "tokenizer.chat_template.../x": "X"}
    )
    assert named["additional_chat_templates/tools.jinja"] == b"T"
    assert named.keys() - files.keys() == {"additional_chat_templates/tools.jinja"}


def test_metadata_that_make_no_tokenizer() -> None:
    good = smollm2()
    for change, error, words in (
        ({AT + "model": "bert"}, UsageError, "no table for this tokenizer"),
        ({AT + "pre": "falcon"}, UsageError, "how this GGUF file's tokenizer cuts"),
        ({AT + "tokens": None}, CheckpointError, "no vocabulary"),
        ({AT + "merges": None}, CheckpointError, "no merges"),
        ({AT + "token_type": np.array([1, 2])}, CheckpointError, "types and tokens"),
        ({AT + "bos_token_id": 49152}, CheckpointError, "bos token is not in the vocabulary"),
        ({AT + "tokens": ["a"] * 49152}, CheckpointError, "'a' twice"),
        ({AT + "model": "llama"}, CheckpointError, "scores and tokens"),
    ):
        with pytest.raises(error, match=words):
            tokenizer_files(good | change)


def test_files_that_llama_cpp_has_no_tokenizer_for(tmp_path: Path) -> None:
    made = piece_tokenizer()
    folder = piece_folder(tmp_path, made)

    def refused(change: Any, error: type[Exception], words: str, size: Any = 900) -> None:
        (folder / "tokenizer.json").write_text(
            change if isinstance(change, str) else json.dumps(made | change)
        )
        with pytest.raises(error, match=words):
            vocabulary_fields(folder, {"vocab_size": size})

    refused({}, CheckpointError, "more tokens than the embedding has rows", 899)
    refused({"model": made["model"] | {"type": "Unigram"}}, UsageError, "no tokenizer of this kind")
    refused({"model": [1]}, CheckpointError, "no object")
    refused({"model": made["model"] | {"vocab": {"a": "b"}}}, CheckpointError, "no numbering|not a numbering")
    refused({"model": made["model"] | {"merges": [1]}}, CheckpointError, "no pairs")
    refused({"added_tokens": [{"id": "x"}]}, CheckpointError, "no list of tokens")
    refused("[1]", CheckpointError, "no JSON object")
    refused("{", CheckpointError, "no JSON")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        vocabulary_fields(folder, {"vocab_size": 900})
    odd = json.loads(tokenizer_files(smollm2())["tokenizer.json"])
    odd["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "x+"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(odd))
    with pytest.raises(UsageError, match="no name for the way"):
        vocabulary_fields(folder, {"vocab_size": 49152})
