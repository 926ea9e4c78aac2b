"""What a checkpoint holds, from its headers and its config alone: no weight is read.

A module is what the names say: all tensors with the same path, the codes and the scales that belong to them. Where
the checkpoint's container reads it, a quantized module is shown by its scheme's name, with the matrix that it stands
for. Where config and data contradict each other, no engine's reading is taken: the contradiction is listed among the
oddities, the method is named, and the pieces are listed as they lie there.

    parameters(module) = N · K · experts                  of a matrix that was read
                       = bits stored / bits per code      of packed codes otherwise
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.containers.contents import Contents, Stored
from narrowcast.containers.detect import detect, open_source
from narrowcast.containers.gguf import NAME as GGUF
from narrowcast.errors import NarrowcastError
from narrowcast.jobs.opening import open_model
from narrowcast.model.roles import (
    classify,
    find_function,
    find_place,
    quantization_config,
    stem,
)
from narrowcast.store.checkpoint import Checkpoint, text_config
from narrowcast.store.folder import CONFIG, survey
from narrowcast.store.gguf import is_gguf
from narrowcast.store.safetensors import Entry, Reader

if TYPE_CHECKING:
    from narrowcast.model.geometry import Geometry

# Tensors that describe codes and are none: scales, zero points, permutations, stored shapes.
_DESCRIBES = re.compile(
    r"[._](\w*scale(_inv|_2)?|scales|weight_shape|\w*zero_point|qzeros|g_idx|absmax|\w*absmax|\w*quant_map"
    r"|\w*quant_state\.\w+|[qkv]_scale|pre_quant_scale|SCB|weight_format)$"
)
_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_experts", "num_local_experts", "n_routed_experts", "vocab_size", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """One module: its role, how it is stored, the codes' stored shape, parameters and bytes with all pieces.

    ``parameters`` is None where the codes are packed in a way that the config does not explain.
    """

    name: str
    role: str
    scheme: str
    shape: tuple[int, ...]
    parameters: int | None
    nbytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """What was found; ``dtypes`` maps a safetensors dtype to (tensors, bytes)."""

    model: str
    config: dict[str, Any] | None
    shards: tuple[str, ...]
    tensors: int
    modules: tuple[Held, ...]
    dtypes: dict[str, tuple[int, int]]
    tied: tuple[tuple[str, str], ...]
    side_files: tuple[str, ...]
    oddities: tuple[str, ...]

    @property
    def architectures(self) -> list[str]:
        return [str(name) for name in (self.config or {}).get("architectures") or []]

    @property
    def parameters(self) -> int:
        return sum(held.parameters or 0 for held in self.modules)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.dtypes.values())

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config, or None."""
        found = quantization_config(self.config or {})
        return found or None

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of the text model's config that say how large it is."""
        text = text_config(self.config or {})
        return {key: text[key] for key in _SIZES if isinstance(text.get(key), int)}

    @cached_property
    def geometry(self) -> Geometry | None:
        """What the config says that the text model is and keeps; None where it is no family that is known."""
        from narrowcast.model.families import geometry

        try:
            return geometry(self.config or {})
        except NarrowcastError:
            return None

    def groups(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """(role, scheme) to (modules, parameters, bytes), the largest first."""
        found: dict[tuple[str, str], tuple[int, int, int]] = {}
        for held in self.modules:
            key = held.role, held.scheme
            modules, parameters, nbytes = found.get(key, (0, 0, 0))
            found[key] = modules + 1, parameters + (held.parameters or 0), nbytes + held.nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1][2]))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "architectures": self.architectures,
            "model_type": (self.config or {}).get("model_type"),
            "sizes": self.sizes,
            "quantization": self.quantization,
            "kept_per_token": None if self.geometry is None else 2 * self.geometry.kept_elements(),
            "shards": self.shards,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "dtypes": {name: {"tensors": n, "bytes": size} for name, (n, size) in self.dtypes.items()},
            "roles": [
                {"role": role, "scheme": scheme, "modules": n, "parameters": parameters, "bytes": size}
                for (role, scheme), (n, parameters, size) in self.groups().items()
            ],
            "tied": [{"head": head, "embedding": embedding} for head, embedding in self.tied],
            "side_files": self.side_files,
            "oddities": self.oddities,
            "modules": [
                {"name": held.name, "role": held.role, "scheme": held.scheme, "shape": held.shape,
                 "parameters": held.parameters, "bytes": held.nbytes, "tensors": held.tensors}
                for held in self.modules
            ],
        }  # fmt: skip


def inspect(model: str | Path) -> Inspection:
    """Look at a directory, one safetensors file or a hub id. A directory may lack its config.json.

    Raises what Checkpoint.open raises for files that cannot be one model.
    """
    with _open(Path(model)) as found:
        config = found.config or {}
        contents, contradiction = _contents(found, config)
        matrices = {stored.module: stored for stored in contents.matrices}
        owner = {name: module for module, stored in matrices.items() for name in stored.tensors}
        method = _Method(quantization_config(config), is_gguf(found.root))
        grouped: dict[str, list[Entry]] = {}
        for name, entry in found.entries.items():
            grouped.setdefault(owner.get(name) or _module(name), []).append(entry)
        modules = tuple(
            _matrix(matrices[path], pieces, config)
            if path in matrices
            else _held(path, pieces, config, method)
            for path, pieces in grouped.items()
        )
        dtypes: dict[str, tuple[int, int]] = {}
        for entry in found.entries.values():
            kind, nbytes = method.blocks.get(entry.name, (entry.dtype.name, entry.nbytes))
            tensors, size = dtypes.get(kind, (0, 0))
            dtypes[kind] = tensors + 1, size + nbytes
        return Inspection(
            model=str(model),
            config=found.config,
            shards=tuple(shard.name for shard in found.shards),
            tensors=len(found.entries),
            modules=modules,
            dtypes=dict(sorted(dtypes.items(), key=lambda item: -item[1][1])),
            tied=found.tied,
            side_files=tuple(map(str, found.side_files)),
            oddities=tuple(_oddities(found, modules, method, contents, contradiction)),
        )


def _open(path: Path) -> Checkpoint:
    """The checkpoint; a directory without config.json is opened all the same, as nothing here needs one."""
    if not os.path.isdir(path) or (path / CONFIG).exists():  # Path.is_dir raises for names that are too long
        return open_model(path)
    folder = survey(path.absolute())
    readers = {shard: Reader(shard) for shard in folder.shards}
    return Checkpoint(
        root=folder.root,
        config=None,
        config_bytes=None,
        shards=folder.shards,
        entries={name: entry for reader in readers.values() for name, entry in reader.entries.items()},
        index=folder.index,
        metadata={},
        side_files=folder.side_files,
        foreign_weights=folder.foreign,
        tied=(),
        _readers=readers,
    )


def _contents(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[Contents, str]:
    """What the container reads, and how the checkpoint contradicts itself where it does."""
    try:
        return detect(open_source(checkpoint, quantization_config(config))), ""
    except NarrowcastError as error:
        facets = (("got", error.got), ("wanted", error.wanted))
        said = "; ".join(f"{word} {value}" for word, value in facets if value is not None)
        return Contents(""), f"{error.problem}: {said}" if said else error.problem


def _module(name: str) -> str:
    """The module that a tensor belongs to; a bias is a module of its own, since it is never quantized."""
    if name.endswith("bias"):
        return name
    path, describes = stem(name), _DESCRIBES.search(name)
    return stem(name[: describes.start()]) if path == name and describes else path


def _matrix(stored: Stored, found: list[Entry], config: Mapping[str, Any]) -> Held:
    """A quantized matrix, or a stack of them, that its container reads."""
    codes = stored.how.part("codes")
    assert codes is not None
    name = stored.module if stored.experts is not None else f"{stored.module}.weight"
    shape = next(entry.shape for entry in found if entry.name == stored.module + codes.suffix)
    n, k = stored.shape
    return Held(
        stored.module, str(classify(name, shape, config)), str(stored.how.scheme.name), shape,
        n * k * (stored.experts or 1), sum(e.nbytes for e in found), tuple(entry.name for entry in found),
    )  # fmt: skip


def _held(path: str, found: list[Entry], config: Mapping[str, Any], method: _Method) -> Held:
    codes = [entry for entry in found if not _DESCRIBES.search(entry.name)] or found
    main = max(codes, key=lambda entry: entry.nbytes)
    pieces = [entry for entry in found if entry is not main]
    scheme, parameters = method.scheme(path, main, pieces), method.parameters(path, main, pieces)
    if _DESCRIBES.search(main.name):
        parameters = 0  # a scale without codes of its own, such as that of a KV cache
    role = str(classify(main.name, main.shape, config))
    names = tuple(entry.name for entry in found)
    size = sum(method.blocks.get(entry.name, ("", entry.nbytes))[1] for entry in found)
    return Held(path, role, scheme, main.shape, parameters, size, names)


class _Method:
    """A quantization_config (that of an open GGUF file says more), and what it says of a module that no container has
    read."""

    def __init__(self, config: Mapping[str, Any], gguf: bool = False) -> None:
        self.config = config
        self.name = str(config.get("quant_method") or config.get("quant_algo") or "") if config else ""
        # Tensors of an open GGUF file that are shown decoded: type and bytes in the file.
        self.blocks: dict[str, tuple[str, int]] = config["blocks"] if gguf else {}

    def scheme(self, path: str, main: Entry, pieces: Iterable[Entry]) -> str:
        """How a module is stored, in a few words: a dtype, or a method and its pieces."""
        described = sorted(e.name[len(path) :].lstrip("._") for e in pieces if _DESCRIBES.search(e.name))
        if not described:
            plain = main.dtype.format or main.dtype.name.lower()
            return self.blocks.get(main.name, (plain, 0))[0]
        spelled = f"{main.dtype.name} with {', '.join(described)}"
        return f"{self.name}: {spelled}" if self.name else spelled

    def parameters(self, path: str, main: Entry, pieces: Iterable[Entry]) -> int | None:
        """Codes in the tensor that holds them; None where they are packed and the config does not say how."""
        ending, stored = main.name[len(path) :], math.prod(main.shape)
        if ending in (".weight_packed", ".qweight"):
            bits = self.config.get("bits")
            return stored * main.dtype.bits // bits if isinstance(bits, int) and bits > 0 else None
        beside = {e.dtype.name for e in pieces if _DESCRIBES.search(e.name)}
        if main.dtype.name == "U8" and (ending == "_blocks" or beside & {"F8_E4M3", "U8", "F32"}):
            return 2 * stored  # two 4-bit codes in a byte: gpt-oss, ModelOpt, bitsandbytes
        return stored


def _oddities(
    checkpoint: Checkpoint, modules: Sequence[Held], method: _Method, contents: Contents, contradiction: str
) -> list[str]:
    """What a reader of the checkpoint should know and might not expect."""
    config, entries = checkpoint.config or {}, checkpoint.entries
    found = []
    if checkpoint.config is None:
        found.append(f"there is no {CONFIG}: architecture, ties and quantization method are not known")
    found += [f"{name} holds weights in another format beside these" for name in checkpoint.foreign_weights]
    found += [f"{head} is stored, and tied to {other}" for head, other in checkpoint.tied if head in entries]
    found += [contradiction] if contradiction else []
    found += [
        *contents.notes,
        *(f"beside its matrices the model computes {what}" for what in contents.online),
    ]
    held = contradiction or contents.matrices or contents.cache_scales or contents.container == GGUF
    if method.name and not held:
        found.append(f"the config says {method.name}, and nothing is quantized")
    uncounted = [held.name for held in modules if held.parameters is None]
    if uncounted:
        found.append(
            f"parameters of {_such(uncounted)} are not counted: the config does not say how they are packed"
        )
    unknown = [held.name for held in modules if len(held.shape) > 1 and not _known(held.name, config)]
    if unknown:
        found.append(f"no rule knows the names of {_such(unknown)}")
    empty = [name for name, entry in entries.items() if entry.nbytes == 0]
    if empty:
        found.append(f"{_such(empty)} hold no elements")
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    stored = _wide_dtype(entries.values())
    if said and stored and said != stored and not method.name:
        found.append(f"the config says {said}, and most bytes are {stored}")
    return found


def _such(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors such as {names[0]}"


def _known(name: str, config: Mapping[str, Any]) -> bool:
    return find_function(name) is not None or find_place(name, config) is not None


def _wide_dtype(entries: Iterable[Entry]) -> str | None:
    """torch's name of the dtype that takes most bytes."""
    sizes: dict[str | None, int] = {}
    for entry in entries:
        sizes[entry.dtype.torch] = sizes.get(entry.dtype.torch, 0) + entry.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)
