"""The pages of ``narrowcast schemes`` and ``narrowcast presets``: what shares a scale, and what that costs.

Bits per weight count scales and zero points. Where no shape is given, the tables use 4096x4096, in which a
scale per tensor or per channel costs next to nothing.
"""

from __future__ import annotations

import re
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.report.tables import facts, number, paragraph, quantity, size, table
from narrowcast.tensors.presets import Preset, presets
from narrowcast.tensors.schemes import Scale, Scheme, Shape, group_shape, schemes

SHAPE: Shape = (4096, 4096)


def parse_shape(text: str) -> Shape:
    """A weight's shape: ``4096x14336``, or ``128x2880x2880`` with an expert axis in front."""
    parts = re.split(r"[x×,]", text.strip().strip("()[]").lower())
    try:
        shape = tuple(int(part) for part in parts)
    except ValueError:
        shape = ()
    if len(shape) < 2 or any(n < 1 for n in shape):
        raise UsageError("not a shape", got=text, wanted="rows x columns, such as 4096x14336")
    return shape


def tile_words(scale: Scale) -> str:
    """A tile as ``tensor``, ``row``, ``1x128``."""
    rows, cols = scale.tile
    if rows == 0 and cols == 0:
        return "tensor"
    return f"{rows or 'N'}x{cols or 'K'}"


def scales_words(scheme: Scheme) -> str:
    return ", ".join(f"{s.format.name} per {tile_words(s)}" for s in scheme.scales)


def schemes_page(shape: Shape = SHAPE) -> list[str]:
    """Every scheme in one table."""
    rows = [
        (s.name, s.element.name, scales_words(s), _rules(s), f"{s.bits_per_weight(shape):.3f}")
        for s in schemes.values()
    ]
    return [
        *table(("scheme", "element", "scales, inner to outer", "rule", "bits"), rows, "lllLr"),
        "",
        *paragraph(
            "1x128: one scale per 128 columns of a row; 1xK: per row, an output channel of a weight or a "
            f"token of an activation. bits: per weight, metadata included, for {_times(shape)}."
        ),
        *paragraph("`narrowcast schemes nvfp4 --shape 4096x14336` counts one out and says who loads it."),
    ]


def _rules(scheme: Scheme) -> str:
    return ", ".join(s.rule for s in scheme.scales)


def _times(shape: Shape) -> str:
    return "x".join(map(str, shape))


def scheme_page(scheme: Scheme, shape: Shape) -> list[str]:
    """One scheme, counted for a weight of this shape."""
    zero = f"{scheme.zero.name}, one per innermost tile" if scheme.zero else "none: symmetric"
    lines = [f"{scheme.name}: {scheme.element.name} elements, {scales_words(scheme)}", ""]
    lines += facts(
        [
            ("span", f"{number(scheme.span)}, the magnitude that a tile's amax is mapped onto"),
            ("zero point", zero),
            ("also called", ", ".join(scheme.aliases)),
            ("loaded by", scheme.loads),
            ("source", scheme.source),
        ]
    )
    parts = _parts(scheme, shape)
    rows = [
        (
            p["part"],
            p["format"],
            p["tile"],
            p["group_shape"],
            p["rule"],
            quantity(p["count"]),
            size(p["bytes"]),
        )
        for p in parts
    ]
    total, bits = sum(p["bytes"] for p in parts), scheme.bits_per_weight(shape)
    elements = parts[0]["count"]
    rows.append(("total", "", "", "", "", "", size(total)))
    lines += ["", f"  for a weight of {_times(shape)}", ""]
    lines += table(
        ("part", "format", "tile", "GroupShape", "rule", "count", "bytes"), rows, "lllllrr", indent=2
    )
    against = f"{16 / bits:.2f} times smaller than bf16 ({size(2 * elements)})"
    return [*lines, "", f"  {bits:.4f} bits per weight, {against}"]


def _parts(scheme: Scheme, shape: Shape) -> list[dict[str, Any]]:
    """Elements, scale levels and zero points: how many and how large."""
    elements = 1
    for n in shape:
        elements *= n

    def part(
        name: str, fmt: str, bits: int, count: int, tile: Scale | None, rule: str = ""
    ) -> dict[str, Any]:
        words = tile_words(tile) if tile else ""
        groups = str(group_shape(tile.tile, weight=True)).replace(" ", "") if tile else ""
        return {
            "part": name,
            "format": fmt,
            "tile": words,
            "group_shape": groups,
            "rule": rule,
            "count": count,
            "bytes": -(-bits * count // 8),
        }

    found = [part("elements", scheme.element.name, scheme.element.bits, elements, None)]
    names = ["scales", "outer scales"]
    for name, scale in zip(names, scheme.scales, strict=False):
        found.append(part(name, scale.format.name, scale.format.bits, scale.count(shape), scale, scale.rule))
    if scheme.zero is not None:
        found.append(
            part("zero points", scheme.zero.name, scheme.zero.bits, scheme.inner.count(shape), scheme.inner)
        )
    return found


def scheme_record(scheme: Scheme, shape: Shape) -> dict[str, Any]:
    return {
        "name": scheme.name,
        "aliases": scheme.aliases,
        "element": scheme.element.name,
        "scales": [
            {
                "format": s.format.name,
                "tile": s.tile,
                "group_shape": group_shape(s.tile, weight=True),
                "rule": s.rule,
                "span": s.span,
                "divides": s.divides,
                "count": s.count(shape),
            }
            for s in scheme.scales
        ],
        "span": scheme.span,
        "zero": scheme.zero.name if scheme.zero else None,
        "loads": scheme.loads,
        "source": scheme.source,
        "shape": shape,
        "bytes": sum(p["bytes"] for p in _parts(scheme, shape)),
        "bits_per_weight": scheme.bits_per_weight(shape),
    }


def presets_page(shape: Shape = SHAPE) -> list[str]:
    """Every preset in one table."""
    rows = []
    for p in presets.values():
        weight, inputs = p.linear.weight, p.linear.input
        rows.append(
            (
                p.name,
                weight.name,
                inputs.name if inputs else "-",
                f"{weight.bits_per_weight(shape):.2f}",
                "needed" if p.calibrated else "-",
                ", ".join(p.aliases),
            )
        )
    calibrated = [p for p in presets.values() if p.calibrated]
    instead = ", ".join(f"{p.nearest} instead of {p.name}" for p in calibrated)
    return [
        *table(("preset", "weights", "inputs", "bits", "calibration", "aliases"), rows, "lllrlL"),
        "",
        *paragraph(
            "inputs: how activations are quantized on the way into a layer, - when they stay wide. bits: per "
            f"weight, metadata included, for {_times(shape)}. Without calibration data use {instead}. "
            "Names are case-insensitive."
        ),
        *paragraph(f"Kept as they are: {_excluded(presets['fp8_dynamic'])}."),
        *paragraph("+kv8, +kv8_head and +kvnv4 after a name quantize the KV cache too (needs calibration)."),
    ]


def _excluded(preset: Preset) -> str:
    return ", ".join(sorted(preset.excluded))


def preset_page(preset: Preset, shape: Shape) -> list[str]:
    """One preset, its weight counted for a shape."""
    linear = preset.linear
    made = "made on the fly" if linear.dynamic else "stored, from calibration"
    inputs = (
        f"{linear.input.name} ({scales_words(linear.input)}), scales {made}"
        if linear.input
        else "the model's dtype"
    )
    pairs = [
        ("weights", f"{linear.weight.name} ({scales_words(linear.weight)})"),
        ("inputs", inputs),
        ("accumulates", linear.accumulate),
        ("KV cache", preset.kv or ""),
        (
            "calibration",
            f"needed; the nearest without is {preset.nearest}" if preset.calibrated else "not needed",
        ),
        ("also called", ", ".join(preset.aliases)),
        ("kept as is", _excluded(preset)),
        ("loaded by", linear.weight.loads),
    ]
    return [f"{preset.name}", "", *facts(pairs), "", *scheme_page(linear.weight, shape)]


def preset_record(preset: Preset, shape: Shape) -> dict[str, Any]:
    linear = preset.linear
    return {
        "name": preset.name,
        "aliases": preset.aliases,
        "weight": linear.weight.name,
        "input": linear.input.name if linear.input else None,
        "dynamic": linear.dynamic,
        "accumulate": linear.accumulate,
        "kv": preset.kv,
        "calibrated": preset.calibrated,
        "nearest": preset.nearest or None,
        "excluded": preset.excluded,
        "loads": linear.weight.loads,
        "bits_per_weight": linear.weight.bits_per_weight(shape),
        "shape": shape,
    }
