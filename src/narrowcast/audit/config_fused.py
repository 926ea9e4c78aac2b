"""Rules about layers that engines load as one: they need one scheme, whatever the config says of each.

q, k, v    gate, up    q_a, kv_a      one matrix at load time      one scheme
experts of a layer                    one kernel for all           one scheme
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.jobs.matching import Held
from narrowcast.model.fused import expert_stacks, fused_groups

_REMEDY = "quantize them alike; `narrowcast quantize` keeps fused layers together"


def _kinds(subject: Subject) -> dict[str, str]:
    """What every linear layer computes, in words that are equal where an engine can load them as one; layers that were
    set aside are left out."""
    if (
        subject.opened is None or subject.container == "gguf"
    ):  # GGUF names a type for each tensor, and engines cope
        return {}
    return {
        name: _kind(one) for name, one in subject.held.items()
        if one.kind == "Linear" and len(one.shape) == 2
    }  # fmt: skip


def _kind(one: Held) -> str:
    from narrowcast.hardware.kinds import input_kind

    if one.coded is None:
        return one.scheme
    linear = one.coded.stored.linear
    inputs = "" if linear.input is None else f" with {input_kind(linear)} inputs"
    return f"{linear.weight.name}{inputs}"


def _odd(members: Iterable[str], kinds: dict[str, str]) -> tuple[str, Counter[str]] | None:
    """The first member of the rarest kind and the count of each kind, where there is more than one."""
    known = [name for name in members if name in kinds]
    counts = Counter(kinds[name] for name in known)
    if len(counts) < 2:
        return None
    rarest = counts.most_common()[-1][0]
    return next(name for name in known if kinds[name] == rarest), counts


@rule("NC520", "error")
def fused_group_differs(subject: Subject) -> Iterator[Finding]:
    """Layers that engines fuse have different schemes.

    What: Of q, k and v, of gate and up, or of another group that is loaded as one matrix, one member is quantized
    otherwise than the rest, or not at all.
    Why: vLLM refuses ("Found different quantization schemes for the shards"), other engines read a part of the fused
    matrix with the scheme of another.
    Fix: Quantize all of them alike, or keep all of them.
    False alarm: An engine that runs these projections one by one, as transformers does.
    """
    kinds = _kinds(subject)
    for members in fused_groups(kinds):
        odd = _odd(members, kinds)
        if odd is not None:
            said = ", ".join(f"{name.rpartition('.')[2]} {kinds[name]}" for name in members)
            yield Finding(
                f"fused group differs: {said}", tensor=odd[0], got=kinds[odd[0]],
                wanted=odd[1].most_common(1)[0][0], remedy=_REMEDY, count=len(members),
            )  # fmt: skip


@rule("NC521", "error")
def experts_differ(subject: Subject) -> Iterator[Finding]:
    """The routed experts of one layer have different schemes.

    What: Some experts of a layer, or some of their projections, are quantized otherwise than the rest, or not at all.
    Why: Engines run all experts of a layer with one kernel; vLLM refuses ("All MoE projections need to have same
    quantization scheme").
    Fix: Quantize all experts of a layer alike.
    False alarm: An engine that runs experts one by one, as older transformers do.
    """
    kinds = _kinds(subject)
    for members in expert_stacks(kinds):
        odd = _odd(members, kinds)
        if odd is not None:
            shown = ", ".join(f"{count} {kind}" for kind, count in odd[1].most_common())
            yield Finding(
                f"{len(members)} projections of the experts differ: {shown}", tensor=odd[0], got=kinds[odd[0]],
                wanted=odd[1].most_common(1)[0][0], remedy=_REMEDY, count=odd[1].most_common()[-1][1],
            )  # fmt: skip
