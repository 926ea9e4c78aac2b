"""Gaps that no format explains: which layer, which part of it, and what is known of the cause.

    a layer is at fault where  local > FACTOR · expected       (studies.local says what the two are)

FACTOR is 2: ``expected`` is what plain rounding to nearest makes, methods that choose codes better make less, and the
worst that an honest one makes more (another scale rule, static input scales that clip) is some tenths. A scale that is
off by 2, halves that are swapped, a lost bias give errors of the size of the output itself, 8 to 40 times as much as
4 and 8 bits.

What joins the layers is compared directly: embeddings, rotary tables, fields of the config. A child in another basis
(its residual stream rotated) parts everywhere and predicts the same: that is said, and is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import torch

from narrowcast.jobs.diagnosing import Case, diagnose
from narrowcast.jobs.matching import Held
from narrowcast.runtime.walk import Running, State
from narrowcast.studies.divergence import relative_squares
from narrowcast.studies.evaluation import Divergence, Fault, Gap, LayerGap, Part
from narrowcast.studies.local import LayerCheck, Local

FACTOR = 2.0
OTHER_BASIS = 0.5  # relative error of embeddings beyond which two models have no basis in common
SAME_WORDS = 0.5  # top-1 agreement of models that mean the same
BIAS = 0.1  # relative error of a bias beyond what 16 bits and bias corrections change
UNTOLD = {
    "quantization_config", "dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path",
    "use_cache", "id2label", "label2id", "attn_implementation", "eos_token_id",
}  # fmt: skip


def divergence(layers: Sequence[LayerGap], local: Local | None, gap: Gap) -> Divergence:
    """The table of layers with what each does by itself, and the faults."""
    if local is None or gap.identical:
        return Divergence(tuple(layers))
    rows = tuple(_with_check(row, local.checks.get(row.layer)) for row in layers)
    embedding = _embedding(local)
    if embedding > OTHER_BASIS and gap.top1.estimate > SAME_WORDS:
        note = "the child's hidden states are in another basis than the parent's; layers tell nothing"
        return Divergence(tuple(layers), notes=(note,))
    faults = [*_outer(local, embedding), *_layers(local)]
    return Divergence(rows, tuple(faults), tuple(_config(local)))


def _with_check(row: LayerGap, check: LayerCheck | None) -> LayerGap:
    return row if check is None else replace(row, local=check.local, expected=check.expected)


def _embedding(local: Local) -> float:
    """Relative error of what enters the first layer."""
    squares = [
        relative_squares(wanted[0], state.hidden[0])
        for wanted, state in zip(local.embedded, local.begun, strict=True)
    ]
    return sqrt(float(torch.cat(squares).mean()))


def _outer(local: Local, embedding: float) -> Iterator[Fault]:
    allowed = 0.3  # 4-bit embeddings keep less error than this
    if embedding > allowed:
        yield Fault(
            "the embedding", embedding, allowed, None,
            f"what enters the first layer differs by {100 * embedding:.3g} % from the parent's",
            "`narrowcast compare` the embeddings, and look at their scaling in config.json",
        )  # fmt: skip
    head = _head(local)
    if head > allowed:
        yield Fault(
            "the head", head, allowed, None,
            f"given the parent's last hidden states, final norm and head differ by {100 * head:.3g} % of the logits",
            "`narrowcast compare` the final norm and lm_head, and look at tie_word_embeddings in config.json",
        )  # fmt: skip
    rotary = _rotary(local)
    if rotary > 0:
        told = "; ".join(_config(local)) or "config.json says nothing of it"
        yield Fault(
            "the rotary positions", rotary, 0.0, None,
            f"the tables of sines and cosines differ by up to {rotary:.3g} ({told})",
            "take rope_theta and rope_scaling from the parent's config.json",
        )  # fmt: skip


def _head(local: Local) -> float:
    """Relative error of logits, each token's around their mean, which softmax does not see."""
    squares = []
    for mine, theirs in zip(local.begun, local.states, strict=True):
        wanted = local.parent.logits(theirs)
        got = local.child.logits(State(mine.ids, theirs.hidden, mine.calls))
        squares.append(relative_squares(*(rows - rows.mean(dim=1, keepdim=True) for rows in (wanted, got))))
    return sqrt(float(torch.cat(squares).mean()))


def _rotary(local: Local) -> float:
    """The largest difference of what layers are given beside hidden states."""
    found = 0.0
    for mine, theirs in zip(local.begun, local.states, strict=True):
        for child, parent in zip(mine.calls, theirs.calls, strict=True):
            found = max(
                found, _table_gap(child.get("position_embeddings"), parent.get("position_embeddings"))
            )
    return found


def _table_gap(child: Any, parent: Any) -> float:
    if not isinstance(child, tuple) or not isinstance(parent, tuple):
        return 0.0
    pairs = [(a, b) for a, b in zip(child, parent, strict=False) if isinstance(a, torch.Tensor)]
    if any(a.shape != b.shape for a, b in pairs):
        return 2.0
    return max((float((a.float() - b.float()).abs().max()) for a, b in pairs), default=0.0)


def _layers(local: Local) -> Iterator[Fault]:
    for i, check in sorted(local.checks.items()):
        if check.local > FACTOR * check.expected:
            part = max(check.parts, key=lambda one: one.error / one.expected, default=None)
            if part is not None and part.error <= FACTOR * part.expected:
                part = None
            yield _fault(i, check, part, local.parent, local.child)


def _fault(i: int, check: LayerCheck, part: Part | None, parent: Running, child: Running) -> Fault:
    """What is known of one layer."""
    size = f"differs by {100 * check.local:.3g} % of what it adds, its format explains {100 * check.expected:.3g} %"
    if part is None:
        return Fault(
            f"layer {i}", check.local, check.expected, None,
            f"given the parent's input, {size}; no linear or norm of it stands out",
            "look at what joins them: positions, attention scaling, the activation (config.json)",
        )  # fmt: skip
    name = f"{child.path}.{i}.{part.name}"
    own = f"{part.name} parts most: {100 * part.error:.3g} %, explained {100 * part.expected:.3g} %"
    cause, remedy = _cause(name, parent, child)
    said = f"given the parent's input, {size}; {own}{cause}"
    return Fault(f"layer {i}, {part.name}", check.local, check.expected, part, said, remedy)


def _cause(name: str, parent: Running, child: Running) -> tuple[str, str]:
    """What the weights say: a known mistake, a lost bias, or nothing."""
    if _bias_lost(name, parent, child):
        return (
            "; its bias is not the parent's",
            "put the parent's bias back (attention_bias, mlp_bias in config.json)",
        )
    remedy = f"narrowcast compare PARENT CHILD --only {name}"
    if not (parent.weights.has(name) and child.weights.has(name)):
        return "", remedy
    a, b = parent.weights.find(name), child.weights.find(name)
    if len(a.shape) != 2:
        return "", remedy
    found = diagnose(Case(a, b, _finder(parent), _finder(child)))
    return ("", remedy) if found is None else (f"; {found.said}", found.remedy)


def _bias_lost(name: str, parent: Running, child: Running) -> bool:
    """Whether the parent has a bias that the child lacks, or has another."""
    if not parent.weights.has(f"{name}.bias"):
        return False
    if not child.weights.has(f"{name}.bias"):
        return True
    wanted, got = (run.weights.tensor(f"{name}.bias").reshape(1, -1) for run in (parent, child))
    return float(relative_squares(wanted, got)) > BIAS**2


def _finder(run: Running) -> Callable[[str], Held | None]:
    return lambda name: run.weights.find(name) if run.weights.has(name) else None


def _config(local: Local) -> list[str]:
    """Fields of the configs that differ and change what is computed."""
    mine, theirs = (run.config.to_dict() for run in (local.child, local.parent))
    return list(differing(mine, theirs))


def differing(child: Mapping[str, Any], parent: Mapping[str, Any]) -> Iterator[str]:
    """Each field that differs, in words."""
    for key in sorted(child.keys() | parent.keys()):
        if key not in UNTOLD and child.get(key) != parent.get(key):
            yield f"config.json: {key} is {child.get(key)}, the parent's {parent.get(key)}"
