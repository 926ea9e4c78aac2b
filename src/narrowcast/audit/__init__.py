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
