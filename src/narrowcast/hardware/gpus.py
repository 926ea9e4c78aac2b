"""Accelerators as rows: memory, bandwidth, architecture, and what their matrix units multiply.

An instruction for a format is one of three conditions for low-precision arithmetic; the engine needs a kernel that
uses it, and the activations must be quantized too. ``formats`` is the first of the three: element formats by name,
and ``mxfp8``, ``mxfp6``, ``mxfp4`` and ``nvfp4`` where the block scales are applied inside the matrix unit. MI300 reads
its eight bits as E4M3FNUZ, so that an E4M3FN byte means half as much there.

A number that is published as a range is its lower end, and the row's notes say so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from narrowcast.errors import UsageError
from narrowcast.hardware.peaks import ACHIEVED, PEAKS

_DATE = "2026-08-22"
_VENDORS = "vendor datasheets as collected in stas00/ml-engineering"
_SHEET = "the vendor's datasheet, not checked against a second source"
_OTHER = "pages of hmc-tech, spheron and cloud vendors"

_TURING = frozenset({"fp16", "int8", "int4"})
_AMPERE = frozenset({"bf16", "fp16", "int8"})
_ADA = _AMPERE | {"e4m3fn", "e5m2"}
_BLACKWELL = _ADA | {"mxfp8", "mxfp6", "mxfp4", "nvfp4"}
_CDNA3 = _AMPERE | {"e4m3fnuz", "e5m2fnuz"}
_CDNA4 = _ADA | {"mxfp8", "mxfp6", "mxfp4"}

FNUZ = "matrix units read E4M3FNUZ: engines double the scales of an E4M3FN checkpoint and clear its 0x80 while loading"
HALVED = "GeForce runs FP16 and FP8 products at half rate when they accumulate in FP32"
INT8_SLOW = (
    "INT8 is given as about 0.15 POPS by NVIDIA's Blackwell brief and as 4500 TOPS by a collection of datasheets; "
    "count on the slow one"
)
RANGE = "bandwidth is published as 7.7 to 8.0 TB/s"


@dataclass(frozen=True)
class GPU:
    """One accelerator: ``arch`` as its compiler calls it, ``capability`` of NVIDIA's (major, minor), memory in GB and
    bandwidth in TB/s as published. None is unknown."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    arch: str | None
    capability: tuple[int, int] | None
    memory_gb: float | None
    bandwidth_tb_s: float | None
    formats: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    source: str = _VENDORS
    date: str = _DATE
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    achieved: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def sm(self) -> int | None:
        """The capability as compilers and engines spell it: 89 for (8, 9)."""
        return None if self.capability is None else 10 * self.capability[0] + self.capability[1]

    @property
    def memory(self) -> float | None:
        """Bytes of memory."""
        return None if self.memory_gb is None else self.memory_gb * 1e9

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return None if self.bandwidth_tb_s is None else self.bandwidth_tb_s * 1e12

    def peak(self, arithmetic: str) -> float | None:
        """Dense FLOP (integer operations) a second in fp32, tf32, bf16, fp16, fp8, int8, fp6, fp4 or int4, accumulated
        as engines do; None where it is not known or the unit is not there."""
        tera = self.peaks.get(arithmetic)
        return None if tera is None else tera * 1e12

    def achievable(self, arithmetic: str) -> float | None:
        """FLOP a second that large products reached in published measurements."""
        tera = self.achieved.get(arithmetic)
        return None if tera is None else tera * 1e12


def _nvidia(
    name: str, sm: int, memory: float, bandwidth: float, formats: frozenset[str], *notes: str,
    aliases: tuple[str, ...] = (), source: str = _VENDORS,
) -> GPU:  # fmt: skip
    capability = divmod(sm, 10)
    return GPU(
        name, aliases, "nvidia", f"sm{sm}", capability, memory, bandwidth, formats, notes, source
    )  # fmt: skip


def _amd(
    name: str, arch: str | None, memory: float, bandwidth: float, formats: frozenset[str], *notes: str
) -> GPU:
    return GPU(name, (), "amd", arch, None, memory, bandwidth, formats, notes)


def _other(
    name: str,
    vendor: str,
    memory: float,
    bandwidth: float,
    formats: set[str],
    *notes: str,
    source: str = _VENDORS,
) -> GPU:
    return GPU(name, (), vendor, None, None, memory, bandwidth, frozenset(formats), notes, source)


_ROWS: tuple[GPU, ...] = (
    _nvidia(
        "v100", 70, 32, 0.90, frozenset({"fp16"}), "INT8 on CUDA cores only (DP4A); no BF16",
        aliases=("v100 sxm2",), source=_SHEET,
    ),
    _nvidia("t4", 75, 16, 0.32, _TURING, "no BF16", source=_SHEET),
    _nvidia("a100", 80, 80, 2.04, _AMPERE | {"int4"}, aliases=("a100 sxm4",)),
    _nvidia("a10", 86, 24, 0.60, _AMPERE, source=_SHEET),
    _nvidia("rtx a6000", 86, 48, 0.768, _AMPERE, aliases=("a6000",), source=_SHEET),
    _nvidia("rtx 3090", 86, 24, 0.936, _AMPERE, HALVED, aliases=("3090",), source=_SHEET),
    _nvidia("orin agx", 87, 64, 0.2048, _AMPERE, aliases=("orin",), source=_SHEET),
    _nvidia("l4", 89, 24, 0.30, _ADA),
    _nvidia("l20", 89, 48, 0.864, _ADA, source=_SHEET),
    _nvidia("l40s", 89, 48, 0.864, _ADA),
    _nvidia("rtx 4090", 89, 24, 1.008, _ADA, HALVED, aliases=("4090",), source=_OTHER),
    _nvidia("h100", 90, 80, 3.35, _ADA, aliases=("h100 sxm5", "h100 hbm3")),
    _nvidia("h100 pcie", 90, 80, 2.0, _ADA),
    _nvidia("h100 nvl", 90, 94, 3.9, _ADA, source=_SHEET),
    _nvidia("h200", 90, 141, 4.8, _ADA, aliases=("h200 sxm",)),
    _nvidia("gh200", 90, 96, 4.0, _ADA),
    _nvidia("gh200 141gb", 90, 141, 4.8, _ADA, aliases=("gh200 hbm3e",)),
    _nvidia("h20", 90, 96, 4.0, _ADA, "later boards have 141 GB", source=_SHEET),
    _nvidia("b100", 100, 192, 7.7, _BLACKWELL, RANGE, source=_OTHER),
    _nvidia("b200", 100, 180, 7.7, _BLACKWELL, RANGE),
    _nvidia("gb200", 100, 186, 8.0, _BLACKWELL),
    _nvidia("b300", 103, 288, 8.0, _BLACKWELL, INT8_SLOW, "nvidia-smi shows 275040 MiB"),
    _nvidia("gb300", 103, 279, 8.0, _BLACKWELL, INT8_SLOW, "memory is published as 279 to 288 GB"),
    _nvidia("rtx 5090", 120, 32, 1.792, _BLACKWELL, HALVED, aliases=("5090",), source=_OTHER),
    _nvidia("rtx pro 6000", 120, 96, 1.792, _BLACKWELL, aliases=("pro 6000",), source=_OTHER),
    _nvidia("gb10", 121, 128, 0.273, _BLACKWELL, "memory is the CPU's too", aliases=("dgx spark",), source=_OTHER),
    GPU(
        "rubin", (), "nvidia", None, None, 288, 22, _BLACKWELL, ("announced, not shipped; capability not known",),
    ),
    _amd("mi250x", "gfx90a", 128, 3.28, _AMPERE, "no FP8"),
    _amd("mi300x", "gfx942", 192, 5.3, _CDNA3, FNUZ),
    _amd("mi325x", "gfx942", 256, 6.0, _CDNA3, FNUZ),
    _amd("mi350x", "gfx950", 288, 8.0, _CDNA4),
    _amd("mi355x", "gfx950", 288, 8.0, _CDNA4),
    _amd("mi455x", None, 432, 23.3, _CDNA4, "announced, not shipped; architecture name not known"),
    _other("gaudi2", "intel", 96, 2.46, {"bf16", "e4m3_ieee"}, "FP8 reaches 240, not 448"),
    _other("gaudi3", "intel", 128, 3.70, {"bf16", "fp16", "e4m3fn"}, "a flag brings FP8's range down to 240"),
    _other("tpu v5e", "google", 16, 0.82, {"bf16", "int8"}, source="jax-ml/scaling-book"),
    _other("tpu v5p", "google", 95, 2.76, {"bf16", "int8"}, source="jax-ml/scaling-book"),
    _other(
        "tpu v6e", "google", 32, 1.6, {"bf16", "int8"}, "FP8 runs at the rate of BF16", source="jax-ml/scaling-book"
    ),
    _other("tpu v7x", "google", 192, 7.37, {"bf16", "e4m3fn"}),
    GPU(
        "cpu", ("x86", "x86_64"), "cpu", "cpu", None, None, None, frozenset({"bf16", "int8"}),
        ("memory and bandwidth are the machine's own; BF16 and INT8 need AVX512_BF16, VNNI or AMX",),
        "vLLM 0.32 (CPU build)",
    ),
)  # fmt: skip

ROWS = tuple(
    replace(row, peaks=PEAKS.get(row.name, {}), achieved=ACHIEVED.get(row.name, {})) for row in _ROWS
)

_MAKERS = re.compile(r"\b(nvidia|amd|instinct|geforce|tesla|radeon|intel|google)\b")
# Words of a product's full name that tell no two rows apart.
_FILLING = frozenset(
    {"graphics", "gpu", "oam", "sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e", "blackwell",
     "workstation", "server", "edition", "generation", "tensor", "core", "nvidia"}
)  # fmt: skip
_SIZE = re.compile(r"^(\d+)(gb|gib|g)$")


def _words(name: str) -> list[str]:
    plain = re.sub(r"[^a-z0-9]+", " ", _MAKERS.sub(" ", name.lower())).split()
    return re.sub(r"(\d+) (gb|gib)\b", r"\1\2", " ".join(plain)).split()


class GPUs(Mapping[str, GPU]):
    """The rows by name, alias or the driver's full product name, in any case and punctuation."""

    def __init__(self, rows: tuple[GPU, ...]) -> None:
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
        words = _words(name)
        exact = self._all.get("".join(words))
        if exact is not None:
            return exact
        sizes = [int(match[1]) for word in words if (match := _SIZE.match(word))]
        kept = [word for word in words if word not in _FILLING and not _SIZE.match(word)]
        row = self._all.get("".join(kept))
        # A size in the name must be the row's: an A100 of 40 GB is another board.
        if row is None or any(row.memory_gb is None or size != row.memory_gb for size in sizes):
            return None
        return row

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


gpus = GPUs(ROWS)
