"""What is left beside the weights: a record for machines and a model card for people.

Neither holds a time or a path of the machine, so that a resumed job ends in the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from narrowcast._version import __version__
from narrowcast.hardware.engines import ENGINES
from narrowcast.jobs.plan import Plan, source_hash
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.schemes import Scheme

_VERBS = {"quantize": "Quantized", "convert": "Converted"}


def scheme_json(scheme: Scheme) -> dict[str, Any]:
    """A scheme with everything that decides its bits."""
    return {
        "element": scheme.element.name,
        "scales": [
            {
                "format": s.format.name,
                "tile": list(s.tile),
                "rule": s.rule,
                "span": s.span or scheme.element.max,
            }
            for s in scheme.scales
        ],
        "zero": scheme.zero.name if scheme.zero else None,
        "arithmetic": vars(scheme.arithmetic),
    }


def record(
    plan: Plan, source: Checkpoint, errors: Mapping[str, Errors], roles: Mapping[str, Errors]
) -> bytes:
    """narrowcast.json: recipe, schemes, coverage, versions, the source's header hash, errors of every matrix."""
    schemes = {unit.scheme_name: unit.how.scheme for unit in plan.units if unit.how.scheme is not None}
    content = {
        "schema": 1,
        "narrowcast": __version__,
        "source": {
            "name": plan.name,
            "headers_sha256": source_hash(source),
            "bytes": plan.source_bytes,
        },
        "recipe": plan.title,
        "container": plan.container,
        "lines": plan.to_json()["lines"],
        "formats": plan.formats,
        "schemes": {name: scheme_json(scheme) for name, scheme in schemes.items()},
        "coverage": {"parameters": plan.coverage_params, "bytes": plan.coverage_bytes},
        "bits_per_weight": plan.bits_per_weight,
        "kept": plan.to_json()["kept"],
        "fallbacks": list(plan.fallbacks),
        "warnings": list(plan.warnings),
        "calibration": plan.calibration,
        "roles": {role: _errors(found) for role, found in roles.items()},
        "matrices": {
            unit.module: {"scheme": unit.scheme_name, "role": unit.role, **_errors(errors[unit.module])}
            for unit in plan.units
        },
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _errors(found: Errors) -> dict[str, Any]:
    sqnr = round(found.sqnr, 3) if isfinite(found.sqnr) else None
    return {
        "sqnr_db": sqnr,
        "elements": found.elements,
        "clipped": found.clipped,
        "underflowed": found.underflowed,
    }


def _decibel(found: Errors) -> str:
    return f"{found.sqnr:.2f}" if isfinite(found.sqnr) else "exact"


def model_card(plan: Plan, roles: Mapping[str, Errors]) -> bytes:
    """README.md: what was done to which layers, what it cost, who loads it."""
    name = plan.name.encode(errors="replace").decode()  # a directory's name need not be UTF-8
    rows = [
        f"| {role} | {found.elements:,} | {_decibel(found)} | {found.clipped:,} | {found.underflowed:,} |"
        for role, found in roles.items()
    ]
    kept = [f"- {count} tensors, {size:,} bytes: {why}" for why, (count, size) in plan.kept.items()]
    fallbacks = ["", "Fallbacks:", "", *(f"- {text}" for text in plan.fallbacks)] if plan.fallbacks else []
    readers = [name for key, name in ENGINES.items() if key in plan.engines]
    lines = [
        "---",
        f"base_model: {json.dumps(name, ensure_ascii=False)}",
        "library_name: transformers",
        f"tags: [quantized, {plan.container}, narrowcast]",
        "---",
        f"# {name}, {plan.title}",
        "",
        f"{_VERBS[plan.verb]} by narrowcast {__version__} with `{plan.title}` into {plan.container} "
        f"({', '.join(plan.formats)}). Readers: {', '.join(readers) or 'none'}.",
        "",
        f"Quantized: {plan.coverage_params:.1%} of the parameters, "
        f"{plan.bits_per_weight:.2f} bits per parameter over all of them.",
        "Every element was read back: what moved is equal bit for bit, and what was rounded lies within half a step of "
        "its source, or is counted below.",
        "",
        "| role | elements | SQNR dB | clipped | underflowed |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Kept as they were:",
        "",
        *kept,
        *fallbacks,
        "",
        "Details of every matrix are in narrowcast.json.",
    ]
    return ("\n".join(lines) + "\n").encode()
