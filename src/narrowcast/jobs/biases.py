"""Biases of experts: cut out of a stack [E, out] with their matrices, or put into one.

    stack[e, first + step · i] = element i of the bias of a projection of expert e

A stack of matrices takes all their biases along, so a stack of biases has no holes: it is whole, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from narrowcast.errors import InputError
from narrowcast.jobs.plan import Copy, Unit
from narrowcast.model.modules import Module
from narrowcast.store.safetensors import Entry


def split(module: Module, entry: Entry) -> list[Copy]:
    """The parts of a stacked bias under the names of the modules that they belong to."""
    copies = []
    for cut in module.splits():
        channels = slice(cut.part.start, cut.part.stop, cut.part.step)
        size = len(range(channels.start, channels.stop, channels.step))
        nbytes = size * entry.dtype.carrier.itemsize
        copies.append(Copy(f"{cut.name}.bias", entry.name, nbytes, (size,), cut.expert, channels))
    return copies


def join(
    units: Iterable[Unit], replaced: Mapping[str, list[Copy]], entries: Mapping[str, Entry]
) -> dict[str, list[Copy]]:
    """Source tensors and what becomes of them, where the biases of stacked matrices are stacked as well.

    A stack is made in the place of its first member, and the other members become nothing. InputError where biases
    are missing or do not fit.
    """
    places = {
        f"{u.module}.bias": u.place for u in units if u.place.experts is not None and u.step != "decode"
    }
    alone = {
        name: [Copy(name, name, entry.nbytes, entry.shape)]
        for name, entry in entries.items()
        if name in places
    }
    found: dict[str, list[Copy]] = {}
    members: dict[str, list[Copy]] = {}
    for tensor, copies in {**alone, **replaced}.items():
        found[tensor] = [copy for copy in copies if copy.name not in places]
        for copy in copies:
            if copy.name in places:
                place = places[copy.name]
                members.setdefault(f"{place.stem}_bias", []).append(replace(copy, to=place))
    for name, parts in members.items():
        found[parts[0].tensor].append(_stack(name, parts, entries))
    return found


def _stack(name: str, parts: list[Copy], entries: Mapping[str, Entry]) -> Copy:
    place = parts[0].to
    assert place is not None
    assert place.experts is not None
    shape = (place.experts, place.rows)
    dtypes = {entries[part.tensor].dtype.name for part in parts}
    filled = sum(part.shape[0] for part in parts)
    if len(dtypes) > 1 or any(len(part.shape) != 1 for part in parts) or filled != place.experts * place.rows:
        raise InputError(
            f"the biases of the experts do not make up {name}", where=f"{parts[0].name} and {len(parts) - 1} more",
            got=f"{filled} elements of {' and '.join(sorted(dtypes))}", wanted=f"{list(shape)}, one dtype",
            remedy="the checkpoint lacks biases that its matrices have; restore them",
        )  # fmt: skip
    nbytes = sum(part.nbytes for part in parts)
    return Copy(name, parts[0].tensor, nbytes, shape, members=tuple(parts))
