"""Rules about the KV cache: whether a config that asks for a narrow one has the scales that go with it.

    stored = round(k / k_scale)        absent: 1.0, and every |k| above 448 saturates

An engine that finds no scale, or one under a name that it does not read, takes 1.0 and says so once in its log. That is
not the same as a file that says 1.0, which somebody may have meant; so these are two rules.

Source: vLLM 0.32 (quantization/kv_cache.py, compressed_tensors.py), SGLang 0.5.23, ModelOpt 0.47, compressed-tensors
0.20; names as in ``narrowcast.hardware.caches``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from narrowcast.audit import cache_advice, cache_sample
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.containers.caches import cache_scales
from narrowcast.containers.contents import CacheScale
from narrowcast.containers.spelling import widened
from narrowcast.store.checkpoint import text_config

__all__ = ["cache_advice", "cache_sample"]

CALIBRATE = "`narrowcast calibrate-kv MODEL OUT --text FILE` makes scales from real text"
_KEYS = re.compile(r"^(.*)\.(k_proj|kv_a_proj_with_mqa|qkv_proj|wkv|wk|Wqkv|query_key_value|c_attn)$")
_TOWER = re.compile(r"vision|visual|audio|encoder", re.IGNORECASE)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def asked(subject: Subject) -> str | None:
    """The narrow cache that the config asks for, with stored scales: ``fp8``, ``fp8_head``, ``nvfp4``, ..."""
    scheme = subject.quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("dynamic") is True:
        return None
    if subject.contents is not None and subject.contents.kv is not None:
        return subject.contents.kv
    if isinstance(scheme, Mapping):
        return "fp8" if scheme.get("num_bits") == 8 else "nvfp4"
    return scheme.lower() if isinstance(scheme, str) else None


def scales(subject: Subject) -> list[CacheScale]:
    """The scales of K and V in the file, whether a container takes them or not; ``kv_scale`` counts for both."""
    return [scale for scale in cache_scales(subject.checkpoint.entries) if scale.which in ("k", "v")]


def by_attention(subject: Subject) -> dict[str, dict[str, str]]:
    """Attention to {k or v: tensor}."""
    found: dict[str, dict[str, str]] = {}
    for scale in scales(subject):
        found.setdefault(scale.attention, {})[scale.which] = scale.tensor
    return found


def attentions(subject: Subject) -> list[str]:
    """Attention modules that keep keys, by the projections in the file: towers, MTP layers and layers of linear
    attention are left out."""
    text = text_config(subject.config)
    hidden, kinds = text.get("num_hidden_layers"), text.get("layer_types")
    found = dict.fromkeys(match[1] for name in subject.layers if (match := _KEYS.match(name)) is not None)
    kept = []
    for name in found:
        layer = layer_number(name)
        if _TOWER.search(name) or layer is None:
            continue
        if isinstance(hidden, int) and layer >= hidden:
            continue
        if isinstance(kinds, list) and layer < len(kinds) and "linear" in str(kinds[layer]):
            continue
        kept.append(name)
    return kept


def layer_number(name: str) -> int | None:
    """The number of the layer that a module is in."""
    match = _LAYER.search(f"{name}.")
    return int(match[1]) if match is not None else None


def stored_numbers(subject: Subject, tensor: str) -> np.ndarray:
    """A scale of the file as float32, flat."""
    entry = subject.checkpoint.entries[tensor]
    return widened(subject.checkpoint.array(tensor).reshape(-1), entry.dtype.name)


def _unique(subject: Subject) -> list[str]:
    return list(dict.fromkeys(scale.tensor for scale in scales(subject)))


@rule("NC200", "warning")
def missing_cache_scales(subject: Subject) -> Iterator[Finding]:
    """The config asks for a narrow KV cache, and the file has no scales.

    What: a KV cache scheme in the config, and no k_scale and v_scale in any shard.
    Why: engines take 1.0. Keys above 448 saturate in E4M3, and families with large keys (Qwen2 and its kin) lose the
    answer on long prompts first.
    Fix: calibrate the cache (`narrowcast calibrate-kv`); or serve with a 16-bit cache; or, where 1.0 was measured to
    do, write it into the file (`narrowcast repair`), so that it is a choice.
    False alarm: a cache with scales made on the fly, which the engine was told by a flag.
    """
    wanted = asked(subject)
    if wanted is not None and not scales(subject):
        yield Finding(
            f"the config asks for an {wanted} KV cache and there are no scales: engines take 1.0", got="no scales",
            wanted="k_scale and v_scale on each attention", remedy=CALIBRATE, repair="unity_kv",
        )  # fmt: skip


@rule("NC201", "warning", reads="scales")
def unity_cache_scale(subject: Subject) -> Iterator[Finding]:
    """A KV cache scale is there and exactly 1.0.

    What: a stored k_scale or v_scale is 1.0, which calibration yields only for an amax of 448 sharp.
    Why: it is what an exporter writes that never saw data, and what ModelOpt's older path clamps to. Keys above 448
    saturate.
    Fix: calibrate the cache (`narrowcast calibrate-kv`), or serve with a 16-bit one. vLLM warns of such a scale as of a
    missing one.
    False alarm: a scale of 1.0 that was measured to do, or was written by `narrowcast repair` when told to.
    """
    for tensor in _unique(subject):
        values = stored_numbers(subject, tensor)
        if values.size and bool((values == 1).all()):
            yield Finding(
                "the KV cache scale is exactly 1.0",
                tensor=tensor,
                got="1.0",
                wanted="amax / 448",
                remedy=CALIBRATE,
            )


@rule("NC202", "warning")
def one_cache_scale(subject: Subject) -> Iterator[Finding]:
    """Only one of k_scale and v_scale is there.

    What: an attention has a scale for its keys and none for its values, or the other way round.
    Why: vLLM takes the keys' scale for the values as well, and stops with an assertion where only the values have one;
    for compressed-tensors it keeps 1.0 for the one that is absent.
    Fix: calibrate both; a shard or a filter of names has most likely dropped one.
    False alarm: none known.
    """
    for attention, pair in by_attention(subject).items():
        if len(pair) == 1:
            which, tensor = next(iter(pair.items()))
            other = "v" if which == "k" else "k"
            stops = which == "v" and subject.container != "compressed-tensors"
            yield Finding(
                f"a KV cache scale for {which} and none for {other}", tensor=tensor, got=f"{which} alone",
                wanted=f"one for {other} of {attention}", remedy=CALIBRATE, severity="error" if stops else None,
            )  # fmt: skip


@rule("NC203", "warning")
def unread_cache_scale(subject: Subject) -> Iterator[Finding]:
    """KV cache scales have names that the engine does not read.

    What: scales of keys and values are in the file, under names that the chosen engine (`--for`) skips. Without a
    choice, an information about names that are not the container's own.
    Why: what an engine does not read, it replaces by 1.0, and says so in one line of its log at most.
    Fix: `narrowcast repair` gives them the container's own names: compressed-tensors' are <attention>.k_scale,
    ModelOpt's <attention>.k_proj.k_scale. An engine that does not read those either needs another container, or the
    scales elsewhere.
    False alarm: a newer engine that knows more names than the table here.
    """
    from narrowcast.hardware.caches import reads_cache_scale
    from narrowcast.hardware.engines import ENGINES

    container, tensors, chosen = subject.container or "", _unique(subject), subject.engine is not None
    own = {scale.tensor for scale in cache_scales(subject.checkpoint.entries) if _own_name(scale, container)}
    for engine in [subject.engine] if subject.engine is not None else ENGINES:
        unread = [name for name in tensors if not reads_cache_scale(engine, name, container)]
        foreign = [name for name in unread if name not in own]
        if unread if chosen else foreign:
            yield Finding(
                f"{ENGINES[engine]} reads {len(tensors) - len(unread)} of {len(tensors)} KV cache scales",
                tensor=unread[0], count=len(unread), got=unread[0].rpartition("self_attn.")[2],
                severity=None if chosen else "info", repair="kv_names" if foreign else None,
                remedy="`narrowcast repair` renames them" if foreign else "another container (`narrowcast convert`)",
                facts={"engine": engine},
            )  # fmt: skip


def _own_name(scale: CacheScale, container: str) -> bool:
    """Whether a scale is called what its container calls it."""
    from narrowcast.containers import containers

    row = containers.get(container)
    if row is None or row.cache is None:
        return False
    return (
        scale.which in row.cache.suffixes
        and scale.tensor == scale.attention + row.cache.suffixes[scale.which]
    )


@rule("NC204", "warning")
def layers_without_cache_scales(subject: Subject) -> Iterator[Finding]:
    """Some attention layers have KV cache scales, and some have none.

    What: the layers with scales are not the layers that keep keys, by the projections in the file and by layer_types.
    Why: layers without a scale run with 1.0; scales that belong to no layer are read by nobody.
    Fix: calibrate again, or copy the checkpoint again where a shard is missing.
    False alarm: layers of linear attention that layer_types does not name have projections called k_proj too.
    """
    given, layers = by_attention(subject), attentions(subject)
    if not given:
        return
    if not layers:
        hidden = text_config(subject.config).get("num_hidden_layers")
        if isinstance(hidden, int) and hidden != len(given):
            yield Finding(
                f"{len(given)} attention layers have KV cache scales, of {hidden} layers", tensor=next(iter(given)),
                got=f"{len(given)} layers", wanted=f"{hidden}", remedy=CALIBRATE,
            )  # fmt: skip
        return
    without = [name for name in layers if name not in given]
    nobody = [name for name in given if name not in layers and not _TOWER.search(name)]
    hidden = text_config(subject.config).get("num_hidden_layers")
    nobody = [name for name in nobody if not isinstance(hidden, int) or (layer_number(name) or 0) < hidden]
    if without:
        numbers = ", ".join(str(layer_number(name)) for name in without[:8])
        more = f" and {len(without) - 8} more" if len(without) > 8 else ""
        yield Finding(
            f"{len(layers) - len(without)} of {len(layers)} attention layers have KV cache scales, "
            f"layers {numbers}{more} have none", tensor=without[0], count=len(without), remedy=CALIBRATE,
            wanted="scales on every attention layer", facts={"layers": [layer_number(name) for name in without]},
        )  # fmt: skip
    if nobody:
        yield Finding(
            f"KV cache scales of {len(nobody)} modules that are no attention layers", tensor=nobody[0],
            count=len(nobody), wanted=f"modules such as {layers[0]}", remedy="remove them, or give them the right name",
        )  # fmt: skip


@rule("NC205", "warning")
def deprecated_cache_scale(subject: Subject) -> Iterator[Finding]:
    """A kv_scale stands for keys and values both.

    What: a tensor is called kv_scale, which was given up for k_scale and v_scale.
    Why: vLLM calls it deprecated and will stop reading it; today it takes it as the scale of the keys and copies it to
    the values, except for compressed-tensors, where the values keep 1.0.
    Fix: `narrowcast repair` writes the two scales.
    False alarm: none known.
    """
    for tensor in _unique(subject):
        if tensor.endswith(".kv_scale"):
            yield Finding(
                "kv_scale is deprecated", tensor=tensor, got="kv_scale", wanted="k_scale and v_scale",
                remedy="`narrowcast repair` writes both", repair="kv_names",
            )  # fmt: skip


@rule("NC206", "error")
def cache_scale_per_head(subject: Subject) -> Iterator[Finding]:
    """KV cache scales of single heads in a container where engines read one number.

    What: a k_scale or v_scale holds several numbers, and the container is not compressed-tensors.
    Why: vLLM stops: "KV-cache scale expects a scalar weight". Only its compressed-tensors loader takes a scale for each
    head (strategy attn_head).
    Fix: move the checkpoint to compressed-tensors with `narrowcast convert`, or take the largest of the heads.
    False alarm: none known.
    """
    if subject.container == "compressed-tensors":
        return
    for tensor in _unique(subject):
        shape = subject.checkpoint.entries[tensor].shape
        if int(np.prod(shape)) > 1:
            yield Finding(
                f"a KV cache scale of {int(np.prod(shape))} numbers", tensor=tensor, got=str(list(shape)),
                wanted="one number", remedy="`narrowcast convert --to compressed-tensors`, or the largest of the heads",
            )  # fmt: skip


@rule("NC207", "error", reads="scales")
def broken_cache_scale(subject: Subject) -> Iterator[Finding]:
    """A KV cache scale is zero, negative, NaN or infinite.

    What: a stored k_scale or v_scale is no positive finite number.
    Why: vLLM takes negative scales as absent and puts 1.0 in their place, and stops with an assertion at a zero or a
    NaN among keys; others divide by it.
    Fix: calibrate the cache again. A scale of zero comes from keys that calibration never saw, -1 from an engine's own
    placeholder.
    False alarm: none known.
    """
    for tensor in _unique(subject):
        values = stored_numbers(subject, tensor)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            yield Finding(
                f"the KV cache scale is {float(values[bad][0]):g}", tensor=tensor, count=int(bad.sum()),
                got=f"{float(values[bad][0]):g}", wanted="a positive finite number", remedy=CALIBRATE,
            )  # fmt: skip


@rule("NC208", "info")
def nvfp4_cache_convention(subject: Subject) -> Iterator[Finding]:
    """Scales of an NVFP4 KV cache mean amax / 448 to some and amax / 2688 to others.

    What: the config asks for an NVFP4 KV cache and the file has its scales; a warning for SGLang.
    Why: ModelOpt writes amax / 448, and vLLM and TensorRT-LLM take it as it is: block scales then reach 75 of 448 and
    nothing is lost but the bottom of their range. SGLang multiplies by 6 on SM100, as for amax / 2688, and so divides
    keys by six times too much: block scales reach 12 and small blocks become subnormal.
    Fix: for SGLang on SM100 store amax / 2688, where ModelOpt wrote amax / 448.
    False alarm: scales that were divided by 6 already; the file does not say which they are.
    """
    if asked(subject) != "nvfp4" or not scales(subject):
        return
    sglang = subject.engine == "sglang"
    if sglang and subject.gpu is not None and (subject.gpu.sm is None or subject.gpu.sm // 10 != 10):
        return
    yield Finding(
        "NVFP4 KV scales are amax / 448 from ModelOpt; SGLang multiplies by 6 on SM100, as if amax / 2688",
        tensor=scales(subject)[0].tensor, count=len(scales(subject)), severity="warning" if sglang else None,
        wanted="amax / 2688 for SGLang on SM100, amax / 448 or 2688 elsewhere",
        remedy="divide the scales by 6 for SGLang on SM100" if sglang else None,
    )  # fmt: skip
