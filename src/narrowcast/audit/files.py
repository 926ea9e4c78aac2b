"""Rules about files: what can be opened at all, and whether shards and index are one save.

    weights = ⋃ shards        index.weight_map = {tensor: shard that has it}, both ways, every tensor once

Beside them: ``files_json`` (configs as texts), ``files_beside`` (tokenizer, templates, code).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from narrowcast.audit import files_beside, files_config, files_json  # noqa: F401 - their rules are of this family
from narrowcast.audit.findings import Finding
from narrowcast.audit.found import Refusal, module_of
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.errors import NarrowcastError
from narrowcast.store.folder import INDEX, SECOND_COPY, some
from narrowcast.store.magic import wrong_file
from narrowcast.store.safetensors import Reader

_TEXTS = (".json", ".jinja", ".model", ".tiktoken")
_PAGES = ("a git-LFS", "an HTML", "an XML")
_LEFT = (".tmp", ".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".narrowcast-tmp")


@rule("NC001", "error")
def refused_layer(subject: Subject) -> Iterator[Finding]:
    """A layer, or the whole checkpoint, contradicts its own container.

    What: the reader of the container finds tensors and config that cannot both be true, and says which. A layer that
    is refused was set aside: nothing else about it was looked at.
    Why: engines guess here, each in its own way, or stop.
    Fix: what the message says; often the checkpoint is the sum of two saves and must be copied again.
    False alarm: a spelling that a newer engine reads and this toolkit does not know yet.
    """
    refused = subject.found.layer_refusals
    if subject.checkpoint.config is None and refused:
        layers, folder = len({module_of(name) for name in subject.found.set_aside}), subject.found.folder
        yield Finding(
            f"{layers} layers cannot be read without config.json", tensor=refused[0].module, count=layers,
            remedy="restore config.json from the checkpoint's origin, then audit again" if folder
            else "audit the directory that has it",
        )  # fmt: skip
        return
    for refusal in refused:
        yield _told(refusal, refusal.module)


@rule("NC002", "error")
def refused_file(subject: Subject) -> Iterator[Finding]:
    """A file of the checkpoint cannot be read, or says what cannot be.

    What: a shard that is cut off, a header that lies, an index without a table, a config whose values are of another
    kind than they must be.
    Why: engines load such a checkpoint in part, or as another model, or not at all.
    Fix: download or copy the file again; `narrowcast repair` writes an index anew where every tensor is there.
    False alarm: none known.
    """
    for refusal in subject.found.file_refusals:
        yield _told(refusal, _short(refusal.error.where, subject))


def _told(refusal: Refusal, name: str | None) -> Finding:
    error = refusal.error
    got, wanted = (None if facet is None else str(facet) for facet in (error.got, error.wanted))
    return Finding(
        error.problem[:190], tensor=name, got=got, wanted=wanted, remedy=error.remedy,
        count=max(len(refusal.tensors), 1), repair=refusal.repair,
    )  # fmt: skip


def _short(where: object, subject: Subject) -> str:
    """A path below the checkpoint without the checkpoint's own."""
    path = Path(str(where or subject.root))
    return str(path.relative_to(subject.root)) if path.is_relative_to(subject.root) else str(path)


@rule("NC003", "error")
def placeholder_file(subject: Subject) -> Iterator[Finding]:
    """A file is a placeholder or something else than its name says.

    What: a git-LFS pointer, a web page that a server answered with, or nothing at all lies where weights, a config
    or a tokenizer should be; or a pickle or GGUF is called .safetensors.
    Why: no engine can load it; some say so only after minutes of loading the other shards.
    Fix: `git lfs pull`, or download the file again while logged in.
    False alarm: none known.
    """
    for file in subject.found.files:
        damaged = str(file) in subject.found.damaged
        head = _head(subject.root / file) if damaged or file.suffix in _TEXTS else None
        other = wrong_file(head) if head is not None else None
        if other is not None and (damaged or not head or other.what.startswith(_PAGES)):
            yield Finding(other.what, tensor=str(file), got=other.seen, remedy=other.remedy)


def _head(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(512)
    except OSError:
        return None


@rule("NC004", "error")
def dangling_link(subject: Subject) -> Iterator[Finding]:
    """A name in the directory leads to no file.

    What: a symlink to nothing, or a pipe or device, where files of the model are.
    Why: a cache of downloads keeps files as links; after it was moved or pruned in part, some lead nowhere, and
    engines stop or take the file for absent (a tokenizer, a generation config).
    Fix: finish the download, or copy with links followed (`cp -L`).
    False alarm: none known.
    """
    for link in subject.found.links:
        path = subject.root / link
        target = str(path.readlink()) if path.is_symlink() else "no regular file"
        yield Finding(
            "leads to no file", tensor=str(link), got=target, wanted="a regular file or a link to one",
            remedy="finish the download, or remove the name",
        )  # fmt: skip


@rule("NC005", "error")
def missing_shard(subject: Subject) -> Iterator[Finding]:
    """A shard of the checkpoint is not there.

    What: the index, or the numbers in the names of the others, promise a file that the directory does not have.
    Why: the layers in it cannot be loaded; a loader that takes what it finds fills them with random numbers.
    Fix: finish the download of this file.
    False alarm: none known.
    """
    tensors = Counter(subject.found.indexed.values())
    for name in subject.found.absent:
        near = [f.name for f in subject.found.files if str(f).lower() == name.lower()]
        yield Finding(
            "the shard is missing", tensor=name, count=max(tensors[name], 1), got=near[0] if near else None,
            wanted=f"{tensors[name]} tensors in it" if tensors[name] else None,
            remedy=f"rename {near[0]}" if near else "finish the download of this file",
        )  # fmt: skip


@rule("NC010", "error")
def index_lists_absent(subject: Subject) -> Iterator[Finding]:
    """The index lists tensors that no shard has.

    What: weight_map names a tensor for a shard that is there, readable, and does not have it; nor has another.
    Why: a loader looks for it and stops, or leaves the layer as it was initialized. Index and shards are of two saves.
    Fix: download or save both again. An index written anew would hide the loss, so none is.
    False alarm: a tensor that shares another's memory (a tied head) and was left out of the shard; remove its line.
    """
    found = subject.found
    gone = {*found.absent, *found.damaged}
    entries = subject.checkpoint.entries
    lost: dict[str, list[str]] = {}
    for name, shard in found.indexed.items():
        if name not in entries and shard not in gone:
            lost.setdefault(shard, []).append(name)
    for shard, names in lost.items():
        yield Finding(
            f"the index lists {len(names)} tensors in a shard that does not have them", tensor=shard,
            got=f"{shard} without {some(names, 3)}", count=len(names),
            remedy="shards and index come from different saves: download or save both again",
        )  # fmt: skip


@rule("NC011", "error")
def unlisted_tensor(subject: Subject) -> Iterator[Finding]:
    """A shard has tensors that the index does not list.

    What: tensors in a shard of the model have no line in weight_map.
    Why: engines that open the file read them all; those that go by the index leave them out, and a scale that is left
    out becomes 1.0.
    Fix: `narrowcast repair` writes the index anew from what the shards have.
    False alarm: none known.
    """
    table = subject.found.indexed
    rest: dict[str, list[str]] = {}
    for name, entry in subject.checkpoint.entries.items():
        if table and name not in table:
            rest.setdefault(entry.path.name, []).append(name)
    for shard, names in rest.items():
        yield Finding(
            f"the shard has {len(names)} tensors that the index does not list", tensor=shard, count=len(names),
            got=some(names, 3), wanted="a line in weight_map for each", repair="index",
            remedy="`narrowcast repair MODEL OUT`",
        )  # fmt: skip


@rule("NC012", "error")
def wrong_shard(subject: Subject) -> Iterator[Finding]:
    """A tensor is in another shard than the index says.

    What: weight_map sends a loader to a file that does not have the tensor, while another one has it.
    Why: loaders that go by the index stop, or report the tensor as missing and leave the layer uninitialized.
    Fix: where files were renamed, name them as before; else `narrowcast repair` writes the index anew.
    False alarm: none known.
    """
    entries = subject.checkpoint.entries
    gone = {*subject.found.absent, *subject.found.damaged}
    off: dict[tuple[str, str], list[str]] = {}
    for name, shard in subject.found.indexed.items():
        if name in entries and entries[name].path.name != shard and shard not in gone:
            off.setdefault((shard, entries[name].path.name), []).append(name)
    for (said, real), names in off.items():
        yield Finding(
            f"{len(names)} tensors lie in another shard than the index says", tensor=said, count=len(names),
            got=f"{some(names, 3)} in {real}", wanted=said, repair="index", remedy="`narrowcast repair MODEL OUT`",
        )  # fmt: skip


@rule("NC013", "info")
def index_size(subject: Subject) -> Iterator[Finding]:
    """The index gives another total size than the tensors have.

    What: metadata.total_size is not the sum of the tensors' bytes; often it is the unquantized parent's.
    Why: nothing that is computed depends on it, but forecasts of memory and hub pages do.
    Fix: `narrowcast repair` writes the index anew.
    False alarm: tied tensors that a writer counted twice.
    """
    said = (subject.found.index or {}).get("metadata")
    size = said.get("total_size") if isinstance(said, dict) else None
    if not isinstance(size, int | float) or not subject.found.whole:
        return
    real = sum(entry.nbytes for entry in subject.checkpoint.entries.values())
    if int(size) != real:
        yield Finding(
            "total_size of the index is not what the tensors take", tensor=subject.found.index_name,
            got=f"{int(size)} bytes", wanted=f"{real} bytes", repair="index", remedy="`narrowcast repair MODEL OUT`",
        )  # fmt: skip


@rule("NC014", "error")
def no_index(subject: Subject) -> Iterator[Finding]:
    """Weights are in files that loaders cannot find without an index.

    What: several weight files and no index, or one that is not called model.safetensors.
    Why: transformers looks for model.safetensors or for the index and finds neither; vLLM and SGLang read every
    *.safetensors file that is there, other copies of the model included.
    Fix: `narrowcast repair` writes the index where the files are one family, model-00001-of-00003 and so on; else
    move the files that do not belong to the model away.
    False alarm: formats of their own that name the file in another way (Mistral's consolidated.safetensors).
    """
    found = subject.found
    names = sorted(shard.name for shard in subject.checkpoint.shards)
    if not found.folder or found.index_name or not names or names == ["model.safetensors"]:
        return
    if all(SECOND_COPY.match(name) for name in names):
        return
    one_save = not (found.unnamed or found.doubled) and found.whole
    said = (
        f"{len(names)} weight files and no index"
        if len(names) > 1
        else "the only weight file has an unusual name"
    )
    yield Finding(
        said, tensor=names[0], got=some(names, 3), wanted=INDEX if len(names) > 1 else "model.safetensors or an index",
        repair="index" if one_save else None, count=len(names),
        remedy="`narrowcast repair MODEL OUT`" if one_save else "move the files that are not the model's away",
    )  # fmt: skip


@rule("NC015", "error")
def doubled_tensor(subject: Subject) -> Iterator[Finding]:
    """A tensor is in two shards.

    What: two weight files have a tensor of the same name.
    Why: which of the two counts depends on the engine and on the order of files.
    Fix: remove the file that belongs to another save, and write the index anew.
    False alarm: both copies have the same bytes, which the finding says; then memory is all that is lost.
    """
    pairs: dict[tuple[str, str], list[str]] = {}
    for name, both in subject.found.doubled.items():
        pairs.setdefault(both, []).append(name)
    for (one, other), names in pairs.items():
        differ = [name for name in names if not _same(subject.root / one, subject.root / other, name)]
        yield Finding(
            f"{len(names)} tensors are in two shards, {len(differ)} of them with other bytes", tensor=other,
            got=f"{some(differ or names, 3)} in {one} too", wanted="every tensor once", count=len(names),
            remedy="remove the file that belongs to another save",
        )  # fmt: skip


def _same(one: Path, other: Path, name: str) -> bool:
    with Reader(one) as a, Reader(other) as b:
        x, y = a.entries[name], b.entries[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return False
        one_flat, other_flat = (reader.array(name).reshape(-1).view(np.uint8) for reader in (a, b))
        return np.array_equal(one_flat, other_flat)


@rule("NC016", "warning")
def names_by_case(subject: Subject) -> Iterator[Finding]:
    """Two names differ in upper and lower case only.

    What: two tensors, or two files of the directory, are told apart by the case of letters alone.
    Why: on file systems that fold case (macOS, Windows, some shares) a copy keeps one of the two files; of two such
    tensors one is a misspelling that no model asks for.
    Fix: remove or rename the one that the model does not use.
    False alarm: a model whose parameters really are named so.
    """
    for kind, names in (
        ("file", [str(file) for file in subject.found.files]),
        ("tensor", list(subject.checkpoint.entries)),
    ):
        first: dict[str, str] = {}
        for name in names:
            other = first.setdefault(name.lower(), name)
            if other != name:
                yield Finding(f"a {kind} of the same name in other case is there", tensor=name, got=other)


@rule("NC020", "info")
def other_weights(subject: Subject) -> Iterator[Finding]:
    """Weights in other formats, or a second copy, lie beside the shards.

    What: pickles, GGUF or ONNX files, weights in subfolders, a consolidated copy, an adapter.
    Why: they take space and may be the unquantized weights. Without an index vLLM reads a second copy in
    safetensors as well, so that is a warning.
    Fix: move them out of the directory.
    False alarm: a repository that offers several formats on purpose.
    """
    found = subject.found
    if not found.folder:
        return
    beside = [f for f in subject.checkpoint.foreign_weights if not f.name.endswith(_LEFT)]
    copies = [f for f in beside if len(f.parts) == 1 and f.name.endswith(".safetensors")]
    copies = [f for f in copies if f.name not in found.unnamed and f.name not in found.damaged]
    if copies and found.index is None:
        yield Finding(
            "a second copy of the weights and no index that says which one counts", tensor=str(copies[0]),
            severity="warning", count=len(copies), remedy="move it out of the directory",
        )  # fmt: skip
        beside = [file for file in beside if file not in copies]
    beside = [file for file in beside if file.name not in (*found.unnamed, *found.damaged)]
    if beside:
        size = sum((subject.root / file).stat().st_size for file in beside)
        yield Finding(
            f"{len(beside)} files of weights that are not the model, {size / 1e6:.1f} MB", tensor=str(beside[0]),
            got=some([str(file) for file in beside], 3), count=len(beside),
        )  # fmt: skip


@rule("NC021", "error")
def unnamed_weights(subject: Subject) -> Iterator[Finding]:
    """A weight file beside the shards belongs to no save that the index knows.

    What: a safetensors file at the top of the directory that neither the index nor the numbers of the other files
    name.
    Why: engines that go by the index leave it out, engines that read every file load it; where it has tensors of
    its own or other values, that is another model.
    Fix: remove the file, or the index where that belongs to an older save; `narrowcast repair` then writes a new one.
    False alarm: an adapter or a draft model that an engine is told of separately; keep it in a folder of its own.
    """
    entries = subject.checkpoint.entries
    for name in subject.found.unnamed:
        path = subject.root / name
        try:
            with Reader(path) as reader:
                own = [tensor for tensor in reader.entries if tensor not in entries]
                count = len(reader.entries)
        except NarrowcastError:  # a broken stray is still a stray
            own, count = [], 0
        yield Finding(
            f"{count} tensors in a file that belongs to no save, {len(own)} of them nowhere else", tensor=name,
            got=some(own, 3) if own else None, count=max(count, 1), wanted="only files that the index names",
            remedy="remove the file, or the index when it belongs to an older save",
        )  # fmt: skip


@rule("NC022", "warning")
def leftover_download(subject: Subject) -> Iterator[Finding]:
    """A killed download or writer left a file.

    What: files that end in .tmp, .incomplete, .part and the like.
    Why: a transfer did not finish; what else it should have brought may be missing or old.
    Fix: finish the download, then remove what is left.
    False alarm: another program is writing at this moment.
    """
    left = [str(file) for file in subject.found.files if file.name.endswith(_LEFT)]
    if left:
        yield Finding(
            f"{len(left)} files of an unfinished transfer", tensor=left[0], got=some(left, 3), count=len(left),
            remedy="finish the download, then remove them",
        )  # fmt: skip
