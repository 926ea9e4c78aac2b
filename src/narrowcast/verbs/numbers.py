"""Verbs about numbers: formats, schemes, presets, roundtrip, vectors."""

from __future__ import annotations

import argparse
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.verbs.answering import answer


def run_formats(args: argparse.Namespace) -> int:
    from narrowcast.numbers.formats import formats
    from narrowcast.report import formats as pages

    _needs(args.row, row=("scheme", args.scheme), rule=("rule", args.rule), span=("span", args.span))
    if args.row is not None:
        if args.plot is not None:
            raise UsageError("--plot draws formats, not a row", remedy="leave --row out")
        if args.name is not None:
            raise UsageError("--row takes schemes, not a format", got=args.name, remedy="--scheme fp8_tensor")
        return _show_row(args)
    if args.plot is not None and (args.value is not None or args.bits is not None):
        raise UsageError("--plot draws formats, not a value", remedy="leave --value and --bits out")
    if args.value is not None or args.bits is not None:
        return _show_explained(args)
    if args.plot is not None:
        from narrowcast.report.format_figures import plot_formats

        plot_formats(args.name, args.plot)
    if args.name is None:
        rows = [pages.format_record(fmt) for fmt in formats.values()]
        return answer(args, pages.formats_page(), {"formats": rows})
    fmt = formats[args.name]
    return answer(args, pages.format_page(fmt), {"format": pages.format_record(fmt)})


def _needs(given: object, **flags: tuple[str, object]) -> None:
    for name, value in flags.values():
        if value is not None and given is None:
            raise UsageError(f"--{name} goes with --row", remedy='--row "0.02 -0.5 1.3" --scheme fp8_tensor')


def _show_explained(args: argparse.Namespace) -> int:
    from narrowcast.jobs.explain import explain, meanings, parse_bits, parse_value
    from narrowcast.numbers.formats import formats
    from narrowcast.report import explain as pages

    rows = [formats[args.name]] if args.name else []
    if args.bits is not None:
        code, width = parse_bits(args.bits)
        found = meanings(code, width, rows)
        return answer(
            args, pages.bits_page(code, width, found), {"bits": pages.bits_record(code, width, found)}
        )
    explained = [explain(parse_value(args.value), fmt) for fmt in rows or formats.values()]
    page = pages.value_page(explained[0]) if rows else pages.values_page(explained)
    return answer(args, page, {"values": [pages.value_record(e) for e in explained]})


def _show_row(args: argparse.Namespace) -> int:
    from narrowcast.jobs.explain import parse_row, scaled_row
    from narrowcast.report import explain as pages

    if args.scheme is None:
        raise UsageError("--row needs a --scheme", remedy="--scheme fp8_tensor,int8_tensor")
    row = parse_row(args.row)
    scaled = [scaled_row(row, scheme) for scheme in _trials(args.scheme, args)]
    return answer(args, pages.row_page(row, scaled), {"row": pages.row_record(row, scaled)})


def _trials(names: str, args: argparse.Namespace) -> list[Any]:
    """Schemes by name, under every rule and span that was asked for."""
    from narrowcast.jobs.explain import parse_value
    from narrowcast.jobs.roundtrip import check_rules, variants
    from narrowcast.tensors.schemes import schemes

    chosen = [schemes[name] for name in _listed(names)]
    rules, spans = _listed(args.rule), [parse_value(span) for span in _listed(args.span)]
    check_rules(chosen, rules, spans)
    return [variant for scheme in chosen for variant in variants(scheme, rules, spans)]


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def run_schemes(args: argparse.Namespace) -> int:
    from narrowcast.report import schemes as pages
    from narrowcast.tensors.schemes import schemes

    shape = pages.parse_shape(args.shape) if args.shape else pages.SHAPE
    if args.plot is not None:
        from narrowcast.report.format_figures import plot_schemes

        plot_schemes(args.name, args.plot)
    if args.name is None:
        rows = [pages.scheme_record(scheme, shape) for scheme in schemes.values()]
        return answer(args, pages.schemes_page(shape), {"schemes": rows})
    scheme = schemes[args.name]
    return answer(args, pages.scheme_page(scheme, shape), {"scheme": pages.scheme_record(scheme, shape)})


def run_presets(args: argparse.Namespace) -> int:
    from narrowcast.report import schemes as pages
    from narrowcast.tensors.presets import presets

    shape = pages.parse_shape(args.shape) if args.shape else pages.SHAPE
    if args.name is None:
        rows = [pages.preset_record(preset, shape) for preset in presets.values()]
        return answer(args, pages.presets_page(shape), {"presets": rows})
    preset = presets[args.name]
    return answer(args, pages.preset_page(preset, shape), {"preset": pages.preset_record(preset, shape)})


def run_roundtrip(args: argparse.Namespace) -> int:
    from narrowcast.jobs.roundtrip import FORMATS, SCHEMES, load_source, roundtrip
    from narrowcast.report.roundtrip import roundtrip_page, roundtrip_record

    neither = args.formats is None and args.schemes is None
    names = _listed(args.formats) if not neither else list(FORMATS)
    trials = _trials(args.schemes or (",".join(SCHEMES) if neither else ""), args)
    if not names and not trials:
        raise UsageError("nothing to try", wanted="--formats or --schemes with names")
    x, source = load_source(args.source, args.seed)
    trips = roundtrip(x, names, trials, source)
    page = roundtrip_page(args.source, x.shape, source.name, trips)
    return answer(args, page, roundtrip_record(args.source, x.shape, source.name, args.seed, trips))


def run_vectors(args: argparse.Namespace) -> int:
    from narrowcast.jobs.vectors import vectors, write
    from narrowcast.report.schemes import parse_shape
    from narrowcast.report.vectors import vectors_page, vectors_record

    made = vectors(args.name, parse_shape(args.shape), args.seed, args.input)
    files = write(made, args.out)
    return answer(args, vectors_page(made, files), vectors_record(made, files))
