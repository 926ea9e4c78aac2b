"""Which container a checkpoint is in, and what is in it: config and data together, contradictions refused.

    the config names a method     that container reads, and refuses what its data deny
    it names none                 nothing in the data may be quantized
    two configs                   must say the same

Nothing is guessed: a tensor of FP8 codes that no matrix claims, or a scale that belongs to none, is an error
that names it,
since the engine that loads such a file would read the codes as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from narrowcast.containers import containers
from narrowcast.containers.contents import Contents, Source, Stored, contradiction
from narrowcast.containers.kinds import refuse_other_kinds
from narrowcast.errors import CheckpointError
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import CONFIG, read_object, some

# Files that quantizers write beside config.json.
BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
# What only quantized matrices have: scales, zero points, orders of columns, packed codes.
_PIECE = re.compile(
    r"(\.|_)(weight_scale(_inv|_2)?|weight_(packed|global_scale|zero_point|scales)|qweight|qzeros|g_idx|SCB|scale_inv"
    r"|weight\.(\w*absmax|\w*quant_map|quant_state\.\w+)|pre_quant_scale|_weight_qdata)$|_proj_(blocks|scales|scale)$"
)

_CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
_BYTES = ("U8", "I8")  # codes where they are called a weight


def open_source(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Source:
    """A checkpoint with its quantization_config (empty: none) and the quantizers' files beside it."""
    names = {str(name) for name in checkpoint.side_files}
    beside = {name: read_object(checkpoint.root / name)[1] for name in BESIDE if name in names}
    refuse_other_kinds(config, checkpoint.root / CONFIG)
    for name, said in beside.items():
        refuse_other_kinds(said, checkpoint.root / name)
    return Source(checkpoint, dict(config), beside)


def detect(source: Source) -> Contents:
    """What the checkpoint holds; CheckpointError for what cannot be one thing."""
    claiming = [row for name in _candidates(source) if (row := containers[name]).claims(source)]
    root = source.checkpoint.root
    if len(claiming) > 1:
        raise CheckpointError(
            "the quantization configs disagree", where=root, got=" and ".join(row.title for row in claiming),
            wanted="one container", remedy="remove the config that the tensors do not follow",
        )  # fmt: skip
    if not claiming and source.config:
        raise CheckpointError(
            "the quantization method is not known", where=root,
            got=str(source.config.get("quant_method") or source.config.get("quant_algo")), wanted=", ".join(containers),
        )  # fmt: skip
    contents = (claiming[0] if claiming else containers["plain"]).read(source)
    for stored in contents.matrices:
        _refuse_misshapen(source, stored)
    _refuse_unclaimed(source, contents)
    return contents


def _refuse_misshapen(source: Source, stored: Stored) -> None:
    """Refuse a matrix with a part of another dtype or size than its spelling has, which would be read past its end or
    as other numbers. How many axes a part has is the container's business."""
    place = stored.place
    for part, spec in zip(stored.how.parts, stored.how.specs(place, stored.shape[1]), strict=True):
        entry = source.entries.get(spec.name)
        if entry is None and part.optional:
            continue
        if entry is None:
            raise contradiction(
                f"{stored.module} is not complete", source, got=f"no {spec.name}", wanted=f"{spec.name} beside it",
                remedy="download or copy the checkpoint again",
            )  # fmt: skip
        if part.piece == "shape":
            continue  # says no more than the matrix's shape; the container has held it against that
        fits = entry.dtype == spec.dtype and _axes(entry.shape) == _axes(spec.shape)
        if part.piece == "codes" and entry.dtype != spec.dtype and stored.how.container == "bitsandbytes":
            # which stores them as any wider element
            fits = 8 * entry.nbytes == prod(spec.shape) * spec.dtype.bits
        if not fits:
            n, k = stored.shape
            raise contradiction(
                f"{spec.name} does not fit its matrix", source, got=f"{entry.dtype.name} {list(entry.shape)}",
                wanted=f"{spec.dtype.name} {list(spec.shape)} for a matrix [{n}, {k}] of {stored.how.format}",
                remedy="download or copy the checkpoint again; pieces of two saves do not go together",
            )  # fmt: skip


def _axes(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _candidates(source: Source) -> list[str]:
    """The containers that may claim a checkpoint. A config that names one alone is enough to load no other; without
    any config, only gpt-oss's tensors speak for themselves."""
    method = str(source.config.get("quant_method") or "")
    named = [name for name in containers if name == method.replace("_", "-")]
    if source.beside or (source.config and not named):
        return [name for name in containers if name != "plain"]
    return named or ["mxfp4"]


def _refuse_unclaimed(source: Source, contents: Contents) -> None:
    consumed = contents.consumed
    rest = {name: entry for name, entry in source.entries.items() if name not in consumed}
    codes = [name for name, entry in rest.items() if entry.dtype.name in _CODES]
    scales = [n for n, entry in rest.items() if _PIECE.search(n) or entry.dtype.name == "F8_E8M0"]
    if not scales:
        codes += [n for n, entry in rest.items() if entry.dtype.name in _BYTES and n.endswith(".weight")]
    says = f"{contents.container}" if source.config else "no quantization_config"
    if codes:
        raise CheckpointError(
            f"{len(codes)} tensors hold codes that have no scale", where=source.checkpoint.root, got=some(codes, 3),
            wanted=f"a scale beside each, as the config says ({says})",
            remedy="an engine would read a scale of 1.0; restore the scales from the checkpoint's origin",
        )  # fmt: skip
    if scales:
        raise CheckpointError(
            f"{len(scales)} tensors belong to a quantization that the config does not mention",
            where=source.checkpoint.root, got=some(scales, 3), wanted=f"tensors of {says}",
            remedy="restore the quantization_config that belongs to these tensors",
        )  # fmt: skip
