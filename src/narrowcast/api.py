"""The functions behind ``import narrowcast``: one tensor in memory, or a whole checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels.reference.dequantize import dequantize as _decode
from narrowcast.numbers.formats import BF16, FP16, FP32, Format
from narrowcast.runtime.arrays import widened
from narrowcast.runtime.tensors import quantize as _encode
from narrowcast.tensors.metrics import ErrorReport
from narrowcast.tensors.metrics import error_report as _report
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme, schemes

if TYPE_CHECKING:
    from narrowcast.jobs.compare import Comparison
    from narrowcast.jobs.quantize import Result
    from narrowcast.serving.plan import Plan

_DTYPES: dict[str, Format] = {
    "float32": FP32, "fp32": FP32, "float16": FP16, "fp16": FP16, "bfloat16": BF16, "bf16": BF16,
}  # fmt: skip


def quantize(model: str | Path, out: str | Path, preset: str | None = None, **options: Any) -> Result:
    """Quantize a checkpoint on disk, check every element of the result, and say what it lost.

        narrowcast.quantize("SmolLM2-135M", "out", preset="FP8_DYNAMIC", ignore=["lm_head"])

    Options are those of the command: ``ignore``, ``targets``, ``recipe``, ``rule``, ``container``,
    ``strict``, ``nonfinite``, ``workers``, ``resume``, ``stats``, ``stat``. Raises UsageError for what cannot be
    asked, InputError for a source that is not what it claims to be.
    """
    from narrowcast.jobs.quantize import quantize as run

    return run(model, out, preset, **options)


def convert(model: str | Path, out: str | Path, to: str, **options: Any) -> Result:
    """Move a checkpoint into another container, without rounding where that can be, and check the result.

        narrowcast.convert("DeepSeek-FP8", "out", "plain")

    Options are those of the command: ``preset``, ``ignore``, ``targets``, ``dtype``, ``requantize``, ``saturate``,
    ``parent``, ``workers``, ``resume``. Raises UsageError for what cannot be asked or has no equal in the target,
    InputError for a source that contradicts itself.
    """
    from narrowcast.jobs.convert import convert as run

    return run(model, out, to, **options)


def compare(a: str | Path, b: str | Path, **options: Any) -> Comparison:
    """Compare two checkpoints tensor by tensor as the numbers they decode to, in whatever containers; A is the
    reference.

        narrowcast.compare("MODEL", "MODEL-NVFP4", min_sqnr=18).passed

    Options are those of the command: ``only``, ``min_sqnr`` (dB), ``workers``. Raises UsageError for a pattern that
    matches nothing, InputError for a checkpoint that contradicts itself.
    """
    from narrowcast.jobs.compare import compare as run

    return run(a, b, **options)


def plan(model: str | Path, gpu: str = "here", **options: Any) -> Plan:
    """What will really run on a GPU, how fast at most, what fits, what to choose and what not to do; from the config
    and headers alone.

        narrowcast.plan("MODEL", gpu="L4", preset="fp8_dynamic", context=32768, batch=16).memory.tokens

    ``gpu`` is a name, or ``here`` for this machine's. Options are those of the command: ``engine``, ``tp``, ``pp``,
    ``ep``, ``context``, ``batch``, ``preset`` (a name or several), ``container``, ``kv``, ``utilisation``,
    ``evaluations``, ``gpus``. Times are lower bounds in seconds, sizes bytes. Raises UsageError for names that there
    are not, InputError for a model that is not what it claims to be.
    """
    from narrowcast.serving.plan import plan as run

    return run(model, gpu, **options)


def quantize_tensor(x: Any, scheme: str | Scheme) -> QTensor:
    """``x`` [..., N, K], an array of floats of numpy, ml_dtypes or torch (bf16 included), under a scheme.

    Raises NonFiniteError for NaN and infinity, UsageError for an unknown scheme or what is no float matrix.
    """
    values, source = widened(x)
    return _encode(values, _scheme(scheme), source)


def dequantize(q: QTensor, dtype: Any = "float32") -> Any:
    """The exact decode of ``q``, rounded once to ``dtype``.

    ``dtype`` is a torch dtype (the result is a torch tensor on the CPU), or "float32", "float16" or
    "bfloat16" (numpy; bf16 as uint16 bit patterns, since numpy has no such dtype).
    """
    if type(dtype).__module__ == "torch":
        import torch

        return torch.from_numpy(q.dequantize()).to(dtype)
    name = dtype.lower() if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _DTYPES:
        wanted = "float32, float16, bfloat16 or a torch dtype"
        raise UsageError("cannot dequantize to this dtype", got=name, wanted=wanted)
    values: NDArray[Any] = _decode(q, _DTYPES[name])
    return values


def recode(q: QTensor, scheme: str | Scheme, *, nearest: bool = False) -> QTensor:
    """``q`` in another scheme with the same values, without rounding: MXFP4 as NVFP4, INT4 as INT8, E4M3FN as
    E4M3FNUZ, a scale per tensor as one per channel.

    Raises RangeError, with counts and the first place, for values that have no equal there; ``nearest`` takes the
    nearest ones instead. Raises UsageError for a pair of schemes that can never be equal.
    """
    from narrowcast.errors import RangeError
    from narrowcast.tensors.recode import recode as move

    target = _scheme(scheme)
    moved = move(q, target, nearest=nearest)
    found = moved.nearest if nearest else moved.q
    if found is None:
        raise RangeError(
            f"values of {q.scheme.name} have no equal in {target.name}",
            got=moved.reason,
            remedy="nearest=True rounds",
        )
    return found


def error_report(x: Any, quantized: QTensor | str | Scheme) -> ErrorReport:
    """What ``x`` lost under a scheme, or in a QTensor made from it.

    Raises UsageError when the QTensor has another shape.
    """
    values, source = widened(x)
    if not isinstance(quantized, QTensor):
        quantized = _encode(values, _scheme(quantized), source)
    if quantized.shape != values.shape:
        wanted = f"shape {list(quantized.shape)}"
        raise UsageError(
            "the array is not what was quantized", got=f"shape {list(values.shape)}", wanted=wanted
        )
    return _report(values, quantized)


def _scheme(scheme: str | Scheme) -> Scheme:
    return schemes[scheme] if isinstance(scheme, str) else scheme
