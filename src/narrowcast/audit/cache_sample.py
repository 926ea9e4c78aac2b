"""A sample of keys and values that the user brings, and what it says about the checkpoint's KV cache.

    .npy, one array               keys or values, not said which
    .npz, safetensors             arrays by name: k, layers.3.v, key_states.7
    saturated                     |x| that rounds beyond 448 under the scale of the file, or that engines take

Keys must be as they go into the cache, after rotary embedding. A sample that names no layer is held against the largest
scale of the file: what saturates there saturates under all.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit.cache_advice import kv_advice
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.containers.spelling import widened
from narrowcast.errors import InputError, NonFiniteError
from narrowcast.numbers.codec import encode
from narrowcast.numbers.formats import E4M3FN
from narrowcast.store.safetensors import Reader

if TYPE_CHECKING:
    from narrowcast.audit.subject import Subject

F32 = NDArray[np.float32]
_WORD = re.compile(r"(?:^|[._/])(k|v|key|value)s?(?:_(?:proj|states?|cache))?(?=$|[./]|_?\d)")
_NUMBER = re.compile(r"(?:^|[._/]|[a-z])(\d+)(?=$|[._/])")
FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Sample:
    """Keys (``k``) or values (``v``), or one of both (``kv``), of a layer where the name says it; float32."""

    name: str
    which: str
    layer: int | None
    values: F32

    @property
    def title(self) -> str:
        which = {"k": "K", "v": "V"}.get(self.which, "K or V")
        return which if self.layer is None else f"{which} of layer {self.layer}"


def read_sample(path: str | Path) -> tuple[Sample, ...]:
    """The samples of a .npy, .npz or safetensors file, each of any shape.

    InputError for a file that cannot be read, that has no array called k or v, or an empty one; NonFiniteError for NaN
    and infinity.
    """
    path = Path(path)
    found = tuple(_samples(path))
    if not found:
        raise InputError(
            "no keys and no values in the sample", where=path, got=", ".join(_arrays(path)) or "nothing",
            wanted="arrays whose names hold k or v, such as layers.3.k",
        )  # fmt: skip
    for one in found:
        if not one.values.size:
            raise InputError(
                "a sample of the KV cache is empty", where=f"{path}: {one.name}", wanted="numbers"
            )
        bad = int((~np.isfinite(one.values)).sum())
        if bad:
            raise NonFiniteError(
                "a sample of the KV cache is not finite", where=f"{path}: {one.name}",
                got=f"{bad} of {one.values.size} values are NaN or infinite", wanted="keys or values of a sound run",
            )  # fmt: skip
    return found


def _samples(path: Path) -> Iterator[Sample]:
    for name, array in _arrays(path).items():
        if not name:
            yield Sample(path.name, "kv", None, array)
            continue
        word, numbers = _WORD.search(name), _NUMBER.findall(name)
        if word is not None:
            yield Sample(name, word[1][0], int(numbers[0]) if numbers else None, array)


def _arrays(path: Path) -> dict[str, F32]:
    """Arrays by name; the one of a .npy has none."""
    try:
        if path.suffix == ".safetensors":
            with Reader(path) as reader:
                return {
                    name: _wide(reader.array(name), entry.dtype.name)
                    for name, entry in reader.entries.items()
                    if entry.dtype.name in FLOATS
                }
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": _floats(loaded, path)}
        with loaded:
            return {name: _floats(loaded[name], path) for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        said = (
            error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        )
        raise InputError(
            "the sample of the KV cache cannot be read",
            where=path,
            got=said,
            wanted=".npy, .npz or .safetensors",
        ) from None


def _wide(array: NDArray[Any], dtype: str) -> F32:
    return array.astype(np.float32) if dtype == "F64" else widened(array, dtype)


def _floats(array: NDArray[Any], path: Path) -> F32:
    if array.dtype.kind not in "fiu":
        raise InputError("the sample of the KV cache holds no numbers", where=path, got=array.dtype)
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


@rule("NC210", "info", reads="scales")
def sampled_cache(subject: Subject) -> Iterator[Finding]:
    """What a sample of keys and values becomes in an FP8 cache.

    What: of the sample given with `--kv-sample`, the share that saturates in E4M3 at a scale of 1.0, the scale without
    saturation, and the SQNR in E4M3 and E5M2. It is a warning where part of it saturates under the scale that the file
    has for it, or under the 1.0 that engines take where the config asks for an FP8 cache and has no scale.
    Why: keys that saturate lose the answer on long prompts first, and nothing says so while it serves.
    Fix: calibrate the cache, or store the scale that is given here; keep the cache in 16 bits where both are coarse.
    False alarm: keys that were dumped before the rotary embedding, or a sample of unusual text.
    """
    for sample in subject.sample:
        advice = kv_advice(sample.values)
        share = advice.e4m3.saturated / advice.elements
        letter = sample.which if len(sample.which) == 1 else "k"
        stored = _stored(subject, sample)
        lost = _saturated(sample.values, stored[1]) if stored is not None else 0
        finding = Finding(
            f"{sample.title}: {advice.said}", tensor=sample.name, wanted=f"{letter}_scale {advice.e4m3.scale:.7g}",
            count=advice.e4m3.saturated or 1,
            facts={
                "elements": advice.elements, "amax": advice.amax, "saturated_share_at_one": share,
                "scale": advice.e4m3.scale, "e4m3_db": advice.e4m3.sqnr, "e4m3_db_at_one": advice.e4m3.sqnr_at_one,
                "e5m2_db_at_one": advice.e5m2.sqnr_at_one,
            },
        )  # fmt: skip
        if stored is None or not lost:
            yield finding
            continue
        where, scale = stored
        yield Finding(
            f"{sample.title}: {lost} of {advice.elements} ({lost / advice.elements:.2%}) saturate under {where}",
            tensor=sample.name, got=f"a scale of {scale:.7g}", wanted=finding.wanted, count=lost, severity="warning",
            remedy=f"store a scale of {advice.e4m3.scale:.7g}: e4m3 then has {advice.e4m3.sqnr:.1f} dB, e5m2 at 1.0 "
            f"{advice.e5m2.sqnr_at_one:.1f} dB",
            facts=finding.facts | {"saturated_share": lost / advice.elements, "stored_scale": scale},
        )  # fmt: skip


def _stored(subject: Subject, sample: Sample) -> tuple[str, float] | None:
    """The scale that an FP8 cache has for a sample, with what it is; None where the cache stays wide."""
    from narrowcast.audit.cache import asked, layer_number, scales, stored_numbers

    if asked(subject) not in ("fp8", "fp8_head"):
        return None
    mine = [scale for scale in scales(subject) if scale.which in sample.which]
    if sample.layer is not None:
        mine = [scale for scale in mine if layer_number(scale.attention) == sample.layer]
    found = {scale.tensor: float(stored_numbers(subject, scale.tensor).max(initial=0)) for scale in mine}
    found = {name: value for name, value in found.items() if np.isfinite(value) and value > 0}
    if not found:
        return "the scale of 1.0 that engines take without one", 1.0
    name = max(found, key=found.__getitem__)
    return name if len(found) == 1 else f"the largest scale of the file, {name}", found[name]


def _saturated(values: F32, scale: float) -> int:
    """Elements that are clipped in E4M3; what a tiny scale makes infinite is."""
    with np.errstate(over="ignore"):
        scaled = values / np.float32(scale)
    counts = encode(scaled, E4M3FN).counts
    return counts.clipped + counts.inf
