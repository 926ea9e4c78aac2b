"""The main memory of this machine: what there is, and what a process may still take.

    there is   the kernel's MemTotal, or the limit of the container (cgroup 2) where that is less
    free       the kernel's MemAvailable, or what is left below that limit

None where Linux does not tell.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def whole_memory(root: Path = ROOT) -> int | None:
    """Bytes that there are."""
    found, limit = _field("MemTotal", root), _cgroup("memory.max", root)
    return found if found is None or limit is None else min(found, limit)


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes that this process may still take."""
    free, limit, taken = (
        _field("MemAvailable", root),
        _cgroup("memory.max", root),
        _cgroup("memory.current", root),
    )
    if free is None or limit is None or taken is None:
        return free
    return min(free, max(0, limit - taken))


def _field(name: str, root: Path) -> int | None:
    """Bytes of one field of /proc/meminfo."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cgroup(name: str, root: Path) -> int | None:
    """Bytes of one file of the container's group; None where there is none, or no limit ("max")."""
    try:
        return int((root / "sys/fs/cgroup" / name).read_text())
    except (OSError, ValueError):
        return None
