"""Rules about sizes: blocks and groups that do not divide a matrix, alone or shared by tensor-parallel ranks.

    column   each rank has N / tp rows         q, k, v, gate, up        whole blocks of rows
    row      each rank has K / tp columns      o, down                  whole blocks and groups of columns
    heads    heads % tp = 0                    attention                and kv % tp = 0, or tp % kv = 0 and copies

Matrices that are fused are split one by one: gate and up of 320 rows are 640 together, which is five blocks of 128,
and neither is a number of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.jobs.coded import Coded
from narrowcast.model.fused import fused_groups
from narrowcast.model.geometry import split_of
from narrowcast.store.checkpoint import text_config

MOST_RANKS = 16  # sizes that a finding offers
_SURE = frozenset({"attention", "mlp", "expert", "shared_expert"})


def _split(name: str) -> Literal["column", "row"] | None:
    """How engines split a layer; None where every rank has all of it."""
    split = split_of(name) or "column"
    return None if split == "whole" else split


def _layers(subject: Subject) -> Iterator[tuple[str, Coded, bool, bool]]:
    """Quantized linear layers, one for each kind of name and shape, with whether it is fused and the last of its group.
    Expert and layer numbers never decide, so the first of each kind speaks for all."""
    held = {name: one for name, one in subject.quantized.items() if one.role in _SURE}
    seen: set[tuple[str, object, str]] = set()
    for members in fused_groups(held):
        for name in members:
            coded = held[name].coded
            assert coded is not None
            kind = (re.sub(r"\d+", "#", name), coded.shape, coded.how.scheme.name)
            if kind not in seen:
                seen.add(kind)
                yield name, coded, len(members) > 1, name == members[-1]


def _alike(subject: Subject, name: str) -> int:
    shape = re.sub(r"\d+", "#", name)
    return sum(re.sub(r"\d+", "#", other) == shape for other in subject.quantized)


@rule("NC560", "info")
def cut_tiles(subject: Subject) -> Iterator[Finding]:
    """A matrix's rows or columns are no multiple of its blocks or groups.

    What: The last block or group of a layer is cut off at the edge of the matrix.
    Why: vLLM takes a cut block only at the end of a fused layer and on one rank, so not in gate_proj; in its own fp8
    container it takes it there too, and applies scales to the rows of neighbours without a word. SGLang takes it
    nowhere in a fused layer; transformers reads whole blocks only. Groups must divide K everywhere but in the toolkits
    that wrote them.
    Fix: Quantize with a smaller block or group, or per channel.
    False alarm: It is an error only where the engine that was asked for (--for) refuses it.
    """
    from narrowcast.hardware.tensor_parallel import misplaces, partial_tiles, tp_problems

    for name, coded, fused, last in _layers(subject):
        linear = coded.stored.linear
        cut = partial_tiles(linear, coded.shape)
        if cut is None:
            continue
        refused = None
        if subject.engine is not None:
            container, split = str(subject.container), _split(name) or "column"
            refused = tp_problems(
                subject.engine, container, linear, coded.shape, 1, split, fused=fused, last=last
            )
        does = ""
        if subject.engine is not None and refused:
            joined = fused and subject.quantized[name].role != "expert"
            wrong = misplaces(subject.engine, str(subject.container), linear, joined)
            does = f"; {subject.engine} " + ("applies scales to other rows" if wrong else "refuses it")
        yield Finding(
            f"{cut}: tiles are cut off at the edge{does}",
            severity="error" if refused else None, tensor=name, got=f"{coded.shape[0]}x{coded.shape[1]}",
            wanted=f"whole tiles of {coded.how.scheme.name}" + (f": {refused}" if refused else ""),
            remedy="quantize with a smaller block or group, or per channel", count=_alike(subject, name),
        )  # fmt: skip


@rule("NC561", "error")
def ranks_cut_tiles(subject: Subject) -> Iterator[Finding]:
    """A tensor-parallel size breaks blocks, groups or words of the weights.

    What: With the size that was asked for (--tp), a rank's part of a layer is no whole number of blocks, groups or
    packed words. Fused layers are split one by one, so gate and up must each divide.
    Why: The engine refuses to build the layer, or has no kernel for the rank's part.
    Fix: Choose one of the sizes that the finding gives, or quantize with a smaller block or per channel.
    False alarm: Expert parallelism, which splits no matrix.
    """
    from narrowcast.hardware.tensor_parallel import tp_problems

    if subject.tp == 1:
        return
    engine, container = subject.engine or "vllm", str(subject.container)
    for name, coded, fused, last in _layers(subject):
        split = _split(name)
        if split is None:
            continue
        problems = {
            tp: tp_problems(
                engine, container, coded.stored.linear, coded.shape, _ranks(subject, name, tp), split,
                fused=fused, last=last,
            )
            for tp in sorted({1, 2, 4, 8, 16, 32, subject.tp})
        }  # fmt: skip
        said = problems[subject.tp]
        if said is None:
            continue
        sizes = [
            tp for tp, problem in problems.items() if problem is None and _heads_apart(subject, tp) is None
        ]
        yield Finding(
            f"{said}, with {subject.tp} ranks", tensor=name, got=f"{coded.shape[0]}x{coded.shape[1]}, split by {split}",
            wanted=f"--tp {' or '.join(map(str, sizes))}" if sizes else "another block: no size keeps it whole",
            remedy="choose another --tp, a smaller block, or scales per channel", count=_alike(subject, name),
            facts={"sizes": sizes},
        )  # fmt: skip


def _ranks(subject: Subject, name: str, tp: int) -> int:
    """Parts that a layer is split into: keys and values are copied where there are more ranks than their heads."""
    heads = text_config(subject.config).get("num_key_value_heads")
    shared = name.rpartition(".")[2] in ("k_proj", "v_proj", "wk", "wv")
    return min(tp, heads) if shared and isinstance(heads, int) and heads > 0 else tp


@rule("NC562", "error")
def ranks_cut_heads(subject: Subject) -> Iterator[Finding]:
    """A tensor-parallel size does not divide the attention heads.

    What: With the size that was asked for (--tp), ranks would share a head: num_attention_heads is no multiple of it,
    or num_key_value_heads neither a multiple nor a divisor of it.
    Why: vLLM refuses ("Total number of attention heads must be divisible by tensor parallel size"), or stops with an
    assertion, as SGLang does; whatever the quantization.
    Fix: Choose one of the sizes that the finding gives, or run copies of the model (data parallelism).
    False alarm: Attention that is not split (SGLang's --enable-dp-attention), or an engine that copies heads.
    """
    said = _heads_apart(subject, subject.tp)
    if said is not None and subject.engine != "transformers":
        sizes = [tp for tp in range(1, MOST_RANKS + 1) if _heads_apart(subject, tp) is None]
        yield Finding(
            said, tensor="config.json", got=f"--tp {subject.tp}", wanted=f"--tp {' or '.join(map(str, sizes))}",
            remedy="choose another --tp, or run copies of the model", facts={"sizes": sizes},
        )  # fmt: skip


def _heads_apart(subject: Subject, tp: int) -> str | None:
    """Which heads ``tp`` ranks cannot share, or None."""
    text = text_config(subject.config)
    heads, kv = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0 and heads % tp:
        return f"{tp} ranks cannot share {heads} attention heads"
    latent = "kv_lora_rank" in text  # one latent head, which every rank has whole
    if isinstance(kv, int) and kv > 0 and not latent and kv % tp and tp % kv:
        return f"{tp} ranks cannot share {kv} heads of keys and values"
    return None
