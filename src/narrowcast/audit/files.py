"""Rules about files: what can be opened at all, and what belongs to a checkpoint beside its weights."""

from __future__ import annotations

from collections.abc import Iterator

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject


@rule("NC001", "error")
def refused_layer(subject: Subject) -> Iterator[Finding]:
    """A layer, or the whole checkpoint, contradicts its own container.

    What: the reader of the container finds tensors and config that cannot both be true, and says which. A layer that
    is refused was set aside: nothing else about it was looked at.
    Why: engines guess here, each in its own way, or stop.
    Fix: what the message says; often the checkpoint is the sum of two saves and must be copied again.
    False alarm: a spelling that a newer engine reads and this toolkit does not know yet.
    """
    for refusal in subject.found.layer_refusals:
        error = refusal.error
        yield Finding(
            error.problem, tensor=refusal.module, got=_text(error.got), wanted=_text(error.wanted),
            remedy=error.remedy, count=max(len(refusal.tensors), 1),
        )  # fmt: skip


@rule("NC002", "error")
def refused_file(subject: Subject) -> Iterator[Finding]:
    """A file of the checkpoint cannot be read, or files contradict each other.

    What: a shard that is cut off, a header that lies, an index that lists what no shard has, a config that is no JSON.
    Why: engines load such a checkpoint in part, or as another model, or not at all.
    Fix: download or copy the file again; `narrowcast repair` writes an index anew where every tensor is there.
    False alarm: none known.
    """
    for refusal in subject.found.file_refusals:
        error = refusal.error
        yield Finding(
            error.problem, tensor=str(error.where or subject.root), got=_text(error.got),
            wanted=_text(error.wanted), remedy=error.remedy,
        )  # fmt: skip


def _text(facet: object) -> str | None:
    return None if facet is None else str(facet)
