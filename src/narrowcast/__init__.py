"""narrowcast: low-precision LLM checkpoints, exact to the bit.

    import narrowcast
    narrowcast.quantize("SmolLM2-135M", "out", preset="nvfp4a16")      a checkpoint on disk
    narrowcast.convert("out", "plain", "plain")                        into another container
    narrowcast.compare("SmolLM2-135M", "out").worst[0].sqnr            what that changed
    narrowcast.audit("out", against="SmolLM2-135M").passed             whether anything is silently wrong
    narrowcast.plan("out", gpu="L4").memory.tokens                     what runs, how fast at most, what fits
    q = narrowcast.quantize_tensor(x, "nvfp4")                         one tensor in memory
    narrowcast.dequantize(q), narrowcast.error_report(x, q)
    narrowcast.formats["e2m1"].max, narrowcast.schemes["mxfp4"], narrowcast.presets["w4a16"]

Names are imported on first use, so that ``import narrowcast`` costs nothing; torch is only ever imported when
an argument is a torch tensor.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowcast._version import __version__

if TYPE_CHECKING:
    from narrowcast import audit, errors
    from narrowcast.api import (
        compare,
        convert,
        dequantize,
        error_report,
        plan,
        quantize,
        quantize_tensor,
        recode,
    )
    from narrowcast.numbers.formats import formats
    from narrowcast.runtime.fakequant import fake_quantize
    from narrowcast.studies.verdict import verdict
    from narrowcast.tensors.presets import presets
    from narrowcast.tensors.schemes import schemes

_HOMES = {
    "compare": "narrowcast.api",
    "convert": "narrowcast.api",
    "dequantize": "narrowcast.api",
    "error_report": "narrowcast.api",
    "fake_quantize": "narrowcast.runtime.fakequant",
    "formats": "narrowcast.numbers.formats",
    "plan": "narrowcast.api",
    "presets": "narrowcast.tensors.presets",
    "quantize": "narrowcast.api",
    "quantize_tensor": "narrowcast.api",
    "recode": "narrowcast.api",
    "schemes": "narrowcast.tensors.schemes",
    "verdict": "narrowcast.studies.verdict",
}

__all__ = [
    "__version__", "audit", "compare", "convert", "dequantize", "error_report", "errors", "fake_quantize", "formats",
    "plan", "presets", "quantize", "quantize_tensor", "recode", "schemes", "verdict",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("audit", "errors"):
        return import_module(f"narrowcast.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'narrowcast' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
