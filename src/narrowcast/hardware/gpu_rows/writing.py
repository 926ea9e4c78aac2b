"""How a row is written: positional what everybody asks for, peaks by column, then notes and who else says what."""

from __future__ import annotations

from collections.abc import Mapping

from narrowcast.hardware.gpu import COLUMNS, GPU, NATIVE, SUBJECTS, Source, capability_of, vendor_of
from narrowcast.hardware.gpu_rows.sources import COLLECTED, MEASURED

SHOWN, CHECKED = 0.99, 15 / 16


def row(
    name: str, arch: str | None, memory: float, bandwidth: float, *, aliases: tuple[str, ...] = (),
    vendor: str | None = None, formats: frozenset[str] | None = None, source: Source = COLLECTED,
    sources: Mapping[str, Source] | None = None, notes: Mapping[str, str] | None = None,
    achieved: Mapping[str, float] | None = None, faster: Mapping[str, float] | None = None, checked: bool = False,
    seen: float | None = None, **peaks: float,
) -> GPU:  # fmt: skip
    """One accelerator. ``sources`` has one source for several subjects in one word, ``notes`` likewise: the text, and
    what it is about, separated by spaces. ``formats`` follow from the architecture, which says the vendor too.

    Cards are sold by GB that are GiB. Programs see a little less, and a sixteenth less where the memory is GDDR and
    ``checked`` (ECC): nvidia-smi shows 46068 MiB of an A40's 48, 97887 of an RTX PRO 6000's 96, 143771 of an H200's
    141, and vLLM's logs have 79.19 GiB of an H100's 80, 178.36 of a B200's 180, 31.4 of an RTX 5090's 32, 23.58 of an
    RTX 3090's 24 and 22.05 of an L4's 24. ``seen`` where it is another."""
    by_subject = {part: source for words, source in (sources or {}).items() for part in words.split()}
    about = {text: frozenset(words.split()) for text, words in (notes or {}).items()}
    if achieved:
        by_subject.setdefault("achieved", MEASURED)
    assert {*peaks, *(achieved or {})} <= set(COLUMNS), name
    assert {*by_subject, *frozenset().union(*about.values())} <= set(SUBJECTS), name
    return GPU(
        name, aliases, vendor or vendor_of(arch) or "", arch, capability_of(arch), memory, bandwidth,
        NATIVE[arch or ""] if formats is None else formats, source, peaks, achieved or {}, about, by_subject,
        faster or {}, seen or memory * (CHECKED if checked else SHOWN),
    )  # fmt: skip
