"""Arrays of other libraries as this toolkit holds them: float32 values, and the dtype that they came in.

    numpy    float64, float32, float16; ml_dtypes' bfloat16 and float8 types
    torch    float64, float32, float16, bfloat16, float8 types; any device, gradients left behind

Torch is only imported when an argument is a torch tensor, which means that it is imported already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import BF16, FP16, FP32, FP64, Format, formats

if TYPE_CHECKING:
    import torch

F32 = NDArray[np.float32]
_NUMPY = {"float64": FP64, "float32": FP32, "float16": FP16}
_WANTED = "an array of floats: numpy, ml_dtypes or torch"


def is_torch(x: object) -> bool:
    """Whether ``x`` is a torch tensor, without importing torch."""
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(x).__mro__)


def widened(x: Any) -> tuple[F32, Format]:
    """``x`` as float32 values of the same shape, and the format of its dtype (float64 rounds to nearest).

    Raises UsageError for anything that is not an array of floats.
    """
    if is_torch(x):
        return _from_torch(x)
    array = np.asarray(x)
    if array.dtype.kind == "f" and array.dtype.name in _NUMPY:
        source = _NUMPY[array.dtype.name]
        return widen(array, source), source
    if array.dtype.name in formats and array.dtype.itemsize <= 2:  # ml_dtypes names its types as formats do
        source = formats[array.dtype.name]
        return widen(array.view(f"u{array.dtype.itemsize}"), source), source
    raise UsageError("not an array of floats", got=array.dtype.name, wanted=_WANTED)


def _from_torch(x: torch.Tensor) -> tuple[F32, Format]:
    import torch

    name = str(x.dtype).removeprefix("torch.")
    plain = x.detach().cpu().contiguous()
    if name in _NUMPY:
        return widen(plain.numpy(), _NUMPY[name]), _NUMPY[name]
    if x.dtype == torch.bfloat16:
        return widen(plain.view(torch.int16).numpy().view(np.uint16), BF16), BF16
    if name in formats and x.element_size() == 1:
        return widen(plain.view(torch.uint8).numpy(), formats[name]), formats[name]
    raise UsageError("not an array of floats", got=str(x.dtype), wanted=_WANTED)
