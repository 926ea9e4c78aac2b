"""The accelerators by name: an alias or the driver's full product name will do, in any case and punctuation.

What a row means is told in hardware/gpu.py, the rows are in hardware/gpu_rows; a user's own come from a file
(hardware/own_gpus.py). A size in a name must be the row's: an A100 of 40 GB is another board than one of 80.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from narrowcast.errors import UsageError
from narrowcast.hardware.gpu import GPU
from narrowcast.hardware.gpu_rows import ROWS
from narrowcast.hardware.gpu_rows.sources import FNUZ, INT8_SLOW

__all__ = ["FNUZ", "GPU", "INT8_SLOW", "ROWS", "GPUs", "gpus"]

_MAKERS = re.compile(r"\b(nvidia|amd|instinct|geforce|tesla|radeon|intel|google)\b")
# Words of a product's full name that tell no two rows apart.
_FILLING = frozenset(
    {"graphics", "gpu", "oam", "sxm", "sxm2", "sxm4", "sxm5", "sxm6", "ac", "hbm2", "hbm2e", "hbm3", "hbm3e",
     "blackwell", "workstation", "edition", "generation", "tensor", "core", "nvidia", "vf"}
)  # fmt: skip
_SIZE = re.compile(r"^(\d+)(gb|gib|g)$")


def _words(name: str) -> list[str]:
    plain = re.sub(r"[^a-z0-9]+", " ", _MAKERS.sub(" ", name.lower())).split()
    return re.sub(r"(\d+) (gb|gib)\b", r"\1\2", " ".join(plain)).split()


class GPUs(Mapping[str, GPU]):
    """Rows by name, alias or product name."""

    def __init__(self, rows: tuple[GPU, ...] = ROWS) -> None:
        self._rows = {row.name: row for row in rows}
        self._all = {"".join(_words(name)): row for row in rows for name in (row.name, *row.aliases)}

    def __getitem__(self, name: str) -> GPU:
        found = self._find(name)
        if found is None:
            core = "".join(word for word in _words(name) if word not in _FILLING and not _SIZE.match(word))
            near = difflib.get_close_matches(core, self._all, 3, 0.5)
            names = dict.fromkeys(self._all[key].name for key in near)
            raise UsageError(
                "unknown GPU", got=name, wanted=", ".join(self._rows),
                remedy=f"did you mean {', '.join(names)}?" if names else None,
            )  # fmt: skip
        return found

    def _find(self, name: str) -> GPU | None:
        if name in self._rows:  # as values() asks, over and over
            return self._rows[name]
        words = _words(name)
        exact = self._all.get("".join(words))
        if exact is not None:
            return exact
        sizes = [int(match[1]) for word in words if (match := _SIZE.match(word))]
        kept = [word for word in words if word not in _FILLING and not _SIZE.match(word)]
        for size in sizes:
            named = self._all.get("".join([*kept, f"{size}gb"]))
            if named is not None:
                return named
        row = self._all.get("".join(kept))
        if row is None or any(row.memory_gb is None or size != row.memory_gb for size in sizes):
            return None
        return row

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


gpus = GPUs()
