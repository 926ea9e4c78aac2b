"""Audit: what is silently wrong in a checkpoint, found by reading it, without an engine and without a GPU.

    findings = ⋃ over rules of check(subject)         a rule is one function, its docstring is its documentation

A checkpoint that loads may still serve nonsense: a scale that is missing becomes 1.0, a pattern that matches nothing
leaves layers wide, a swapped nibble is nearly fluent. Engines say so once in a log, or not at all. Rules look at
files, headers, configs, scales, codes and, where it is given, the parent, each as far as it must:

    scope      what a rule is given                 when
    model      the subject                          once, after every pass
    matrix     one quantized matrix, with its       during the pass, so that grids of scales and tiles
               grids of scales and tile maxima      need not be kept
    tensor     one tensor of plain floats           during the pass
    pair       one matrix beside its original       during the pass over both

Families are files here, and the first digit of a rule's code: 0 files, 1 scales, 2 cache, 3 codes, 4 coverage,
5 config, 6 portability, 7 parent. A new rule is one function with a case that fires and one that does not.

This floor lies above the jobs, since rules see a checkpoint as the jobs do (``jobs.coded``, ``jobs.matching``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.audit.run import Audit


class _Callable(ModuleType):
    """The package is the function too: importing any rule puts the package where ``narrowcast.audit`` is looked up,
    so that a function of this name would be lost."""

    def __call__(self, model: str | Path, **options: Any) -> Audit:
        """Find what is silently wrong in a checkpoint.

            found = narrowcast.audit("MODEL-NVFP4", against="MODEL")
            found.passed, [(one.rule, one.tensor, one.said) for one in found.open_findings]

        Options are those of the command: ``against``, ``engine`` (its ``--for``), ``gpu``, ``tp``, ``quick``,
        ``select``, ``ignore``, ``settings``, ``workers``. Raises UsageError for names that do not exist, InputError
        where there is nothing to open; whatever is wrong with what can be opened is a finding.
        """
        from narrowcast.audit.run import audit

        return audit(model, **options)


sys.modules[__name__].__class__ = _Callable
