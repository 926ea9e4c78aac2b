"""A user's own accelerators: rows in a TOML file, named by --gpus FILE or by the variable NARROWCAST_GPUS.

    [gpu.my-card]
    like = "h100"                     # what is not said below is this row's
    memory = 96                       # GB
    bandwidth = 3.9                   # TB/s
    peaks = { bf16 = 835, fp8 = 1671 }    # dense TFLOPS, integers in TOPS
    achieved = { bf16 = 700 }         # what large products reach
    notes = ["the board in rack 4"]

    [gpu.other]
    capability = "8.9"                # or arch = "gfx942"; says vendor and formats too
    memory = 20
    bandwidth = 0.36
    source = "its datasheet"          # else: the file
    date = "2026-05-01"               # else: the day on which the file was changed

Further keys: ``vendor``, ``formats``, ``aliases``. A key or value that is not understood is refused, and so is a name
that already has a row. Left out: a file that is read without being named, by which two machines would answer the same
question differently.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from narrowcast.errors import InputError, UsageError
from narrowcast.hardware.gpu import COLUMNS, GPU, NATIVE, Source, capability_of, vendor_of
from narrowcast.hardware.gpus import ROWS, GPUs, gpus

VARIABLE = "NARROWCAST_GPUS"
HERE = "here"
_LEAST, _MOST = 1e-9, 1e9  # of any number in these units; what lies beyond is a slip and overflows further on
_FORMATS = frozenset().union(*NATIVE.values(), {"e4m3_ieee"})
_KEYS = (
    "like", "memory", "bandwidth", "peaks", "achieved", "capability", "arch", "vendor", "formats", "aliases", "notes",
    "source", "date",
)  # fmt: skip


def named(name: str, file: str | Path | None = None) -> GPU:
    """The accelerator of a name: ``here`` is the machine's own, else a row of ``file`` (or of what the variable
    names), else a row known to everybody. UsageError for an unknown name, InputError for a file that is wrong."""
    if name.strip().lower() == HERE:
        from narrowcast.hardware.machine import here

        return here()
    return known(file)[name]


def known(file: str | Path | None = None) -> GPUs:
    """All rows, a user's own behind the others."""
    path = file if file is not None else os.environ.get(VARIABLE)
    return gpus if not path else GPUs((*ROWS, *read(Path(path))))


def read(path: Path) -> tuple[GPU, ...]:
    """The rows of a TOML file, see the module docstring; a row may be like one above it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        changed = date.fromtimestamp(path.stat().st_mtime).isoformat()
    except FileNotFoundError:
        raise UsageError(
            "the file of GPUs is not there", where=path, remedy=f"--gpus FILE and {VARIABLE} name one"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError("the file of GPUs cannot be read", where=path, got=error) from None
    tables = content.get("gpu")
    if set(content) != {"gpu"} or not isinstance(tables, dict):
        other = ", ".join(sorted(set(content) - {"gpu"}))
        raise InputError(
            "the file of GPUs says something else", where=path, got=other or None, wanted="[gpu.NAME] tables"
        )
    rows: list[GPU] = []
    for name, table in tables.items():
        place = f"{path}: [gpu.{name}]"
        if not isinstance(table, dict):
            raise InputError(
                "a GPU is not a table", where=place, got=table, wanted=f"[gpu.{name}] and keys below it"
            )
        before = GPUs((*ROWS, *rows))
        if name == HERE or name in before:
            raise InputError("the GPU's name is taken", where=place, got=name, wanted="a name of its own")
        rows.append(_Table(place, table, Source(str(path), changed), before).row(name))
    return tuple(rows)


class _Table:
    """One table, read key by key; what is wrong is told with the key, the place and what was wanted."""

    def __init__(self, place: str, table: Mapping[str, Any], file: Source, before: GPUs) -> None:
        self.place, self.table, self.before = place, table, before
        other = [key for key in table if key not in _KEYS]
        if other:
            raise InputError(
                "a GPU's key is not known", where=place, got=", ".join(other), wanted=", ".join(_KEYS)
            )
        self.own = Source(self._text("source") or file.words, self._date() or file.date)

    def row(self, name: str) -> GPU:
        base = self._base()
        arch = self._arch() or (base.arch if base else None)
        formats = self._formats(arch, base)
        peaks, achieved = self._columns("peaks"), self._columns("achieved")
        memory, bandwidth = self._number("memory"), self._number("bandwidth")
        own = {
            *peaks, *(("memory",) if memory else ()), *(("bandwidth",) if bandwidth else ()),
            *(("achieved",) if achieved else ()),
        }  # fmt: skip
        kept = {
            column: tera for column, tera in (base.achieved if base else {}).items() if column not in peaks
        }
        said = {
            text: about for text, about in (base.notes if base else {}).items() if not about or about - own
        }
        notes = {**said, **dict.fromkeys(self._texts("notes"), frozenset[str]())}
        return GPU(
            name, self._aliases(), self._vendor(arch, base), arch, capability_of(arch),
            memory or (base.memory_gb if base else None), bandwidth or (base.bandwidth_tb_s if base else None),
            formats, base.source if base else self.own,
            {**(base.peaks if base else {}), **peaks}, {**kept, **achieved},
            notes,
            {**(base.sources if base else {}), **dict.fromkeys(own, self.own)},
            {column: tera for column, tera in (base.faster if base else {}).items() if column not in peaks},
            base.seen_gib if base and not memory else None,
        )  # fmt: skip

    def _base(self) -> GPU | None:
        like = self._text("like")
        if like is not None and like not in self.before:
            raise InputError(
                "no such GPU to be like", where=self.place, got=like, wanted=", ".join(self.before)
            )
        if like is None and "capability" not in self.table and "arch" not in self.table:
            raise InputError(
                "a GPU's architecture is not said", where=self.place,
                wanted='like = "h100", capability = "8.9" or arch = "gfx942"',
            )  # fmt: skip
        return None if like is None else self.before[like]

    def _arch(self) -> str | None:
        capability = self.table.get("capability")
        if capability is None:
            return self._text("arch")
        found = re.fullmatch(r"(\d+)\.(\d)", str(capability))
        if found is None:
            self._refuse("capability", 'major.minor, such as "8.9"')
        return f"sm{found[1]}{found[2]}"

    def _formats(self, arch: str | None, base: GPU | None) -> frozenset[str]:
        if "formats" in self.table:
            formats = frozenset(self._texts("formats"))
            if not formats <= _FORMATS:
                self._refuse("formats", f"names among {', '.join(sorted(_FORMATS))}")
            return formats
        if base is not None and arch == base.arch:
            return base.formats
        if arch is None or arch not in NATIVE:
            raise InputError(
                "what this architecture multiplies is not known", where=self.place, got=arch,
                wanted=f"formats = [...], or one of {', '.join(NATIVE)}",
            )  # fmt: skip
        return NATIVE[arch]

    def _vendor(self, arch: str | None, base: GPU | None) -> str:
        said = self._text("vendor")
        if said is not None:
            return said
        return vendor_of(arch) or (base.vendor if base else "")

    def _aliases(self) -> tuple[str, ...]:
        aliases = self._texts("aliases")
        taken = [alias for alias in aliases if alias in self.before]
        if taken:
            self._refuse("aliases", f"names that no row has, which {', '.join(taken)} is not")
        return aliases

    def _columns(self, key: str) -> dict[str, float]:
        table = self.table.get(key, {})
        wanted = f"a table with {', '.join(COLUMNS)} in TFLOPS"
        if not isinstance(table, dict) or not set(table) <= set(COLUMNS):
            self._refuse(key, wanted)
        if not all(_positive(value) for value in table.values()):
            self._refuse(key, f"{wanted}, from {_LEAST:g} to {_MOST:g}")
        return {column: float(value) for column, value in table.items()}

    def _number(self, key: str) -> float | None:
        if key not in self.table:
            return None
        if not _positive(self.table[key]):
            self._refuse(
                key,
                f"a number of GB from {_LEAST:g} to {_MOST:g}"
                if key == "memory"
                else f"a number of TB/s from {_LEAST:g} to {_MOST:g}",
            )
        return float(self.table[key])

    def _text(self, key: str) -> str | None:
        value = self.table.get(key)
        if value is not None and not (isinstance(value, str) and value.strip()):
            self._refuse(key, "a text")
        return value

    def _texts(self, key: str) -> tuple[str, ...]:
        value = self.table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and each.strip() for each in value):
            self._refuse(key, "a list of texts")
        return tuple(value)

    def _date(self) -> str | None:
        value = self.table.get("date")
        try:
            return None if value is None else date.fromisoformat(str(value)).isoformat()
        except ValueError:
            self._refuse("date", "a day, such as 2026-05-01")

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        raise InputError(
            f"a GPU's {key} is not understood", where=self.place, got=self.table[key], wanted=wanted
        )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _LEAST <= value <= _MOST
