"""Who gets which scheme: ordered lines of pattern and target, settled before a byte is written.

A recipe is a list of lines; a line is a pattern (see ``patterns``) and what to do with the modules that it
matches: quantize with a preset, quantize with a scheme, or keep. **The first line that takes a module
decides**; modules that no line takes get the default, which may be to keep. As TOML:

    default = "fp8_dynamic"            # a preset for everything no rule takes; without it, keep

    [[rule]]                           # rules are read from the top, first match wins
    match = "lm_head"                  # one pattern or a list
    keep = true

    [[rule]]
    match = ["re:.*mlp\\\\.experts\\\\..*"]
    preset = "nvfp4a16"                # or scheme = "..."
    rule = "floor"                     # optional: another scale rule than the preset's

``--ignore P`` is the line (P, keep) and ``--targets P`` the line (P, the preset) with no default.

Three rules protect what must not be quantized by accident:

1. *Excluded roles.* A preset lists roles that it leaves alone (embeddings, heads, norms, routers, towers,
   MTP). A line takes a module of such a role only if it is explicit: an exact name, or a pattern all of whose
   matches have an excluded role. ``re:.*lm_head`` takes the head; ``re:.*`` passes over it, and the module
   goes on to the next line.
2. *Tied embeddings.* When the output head reads the embedding's tensor, neither is ever quantized: engines
   look rows up in the one and multiply by the other. A line that names either explicitly is an error that
   says so; ``keep`` on the absent ``lm_head`` is fine.
3. *Fused groups.* Layers that engines load as one (see ``fused``) must agree; so must the experts of a layer.

Nothing here knows presets: a ``Lookup`` turns (kind, name) into a ``Target`` or raises.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from narrowcast.errors import UsageError
from narrowcast.model.fused import expert_stacks, fused_groups
from narrowcast.model.modules import Module
from narrowcast.model.patterns import Pattern, near_misses
