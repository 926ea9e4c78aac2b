"""The error tree: every failure a user can cause says what, where, got, wanted and the remedy.

    NarrowcastError            exit code 3, the root; catching it catches everything below
    ├── UsageError             2: an unknown name, a pattern that matches nothing, an output that exists
    └── InputError             3: the input is bad, whoever wrote it
        ├── HeaderError        a safetensors header that lies (lengths, overlaps, holes, duplicates)
        ├── CheckpointError    shards, index and config that do not fit together
        ├── NonFiniteError     NaN or infinity where a format or a job has no place for it
        ├── RangeError         a value outside the format's range under overflow="error"
        ├── StorageError       the disk is full, read-only or another job's
        └── IncomparableError  4: two things that measure nothing beside each other

A message is one line of fact plus indented lines for the facets that are known, so that it reads well in a
terminal and survives being pasted into a bug report. Nothing here formats tracebacks: the CLI prints
``str(error)`` and exits with ``exit_code``.
"""

from __future__ import annotations


class NarrowcastError(Exception):
    """A failure with facets: the problem, and where known the place, the value, the wish and the remedy."""

    exit_code = 3

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        got: object = None,
        wanted: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.got = got
        self.wanted = wanted
        self.remedy = remedy
        facets = [("where", where), ("got", got), ("wanted", wanted), ("remedy", remedy)]
        lines = [problem, *(f"  {name}: {value}" for name, value in facets if value is not None)]
        super().__init__("\n".join(lines))


class UsageError(NarrowcastError):
    """The command or call asks for something that does not exist or must not be done."""

    exit_code = 2


class InputError(NarrowcastError):
    """The bytes that were given are not what they claim to be."""


class HeaderError(InputError):
    """A safetensors header that is truncated, oversized, overlapping, gapped or otherwise untrue."""


class CheckpointError(InputError):
    """Config, index, shards and tensors of a checkpoint contradict each other or are missing."""


class NonFiniteError(InputError):
    """NaN or infinity in data that must be finite; names the tensor, the count and the first index."""


class RangeError(InputError):
    """A value that the target format cannot hold, under ``overflow="error"``."""


class StorageError(InputError):
    """The destination cannot take the result: full, read-only, or holding another job."""


class IncomparableError(InputError):
    """A comparison that would mean nothing: other token ids, another vocabulary, predictions that are NaN."""

    exit_code = 4
