"""Quantized matrices of a checkpoint as one ONNX file, for runtimes that take weights and not models.

Each matrix becomes an initializer with its scales under DequantizeLinear, and one output that is its decoded value. All
chosen matrices are held in memory at once; ``targets`` picks some.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.containers.onnx_qdq import export
from narrowcast.errors import UsageError
from narrowcast.jobs.building import IMMOVABLE
from narrowcast.jobs.coded import Logical, open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.model.patterns import Pattern
from narrowcast.tensors.qtensor import QTensor


@dataclass(frozen=True)
class Exported:
    """The file, its size, and what is in it: matrix to (scheme, shape)."""

    out: Path
    nbytes: int
    matrices: dict[str, tuple[str, tuple[int, ...]]]

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "bytes": self.nbytes,
            "matrices": [
                {"name": name, "scheme": scheme, "shape": list(shape)}
                for name, (scheme, shape) in self.matrices.items()
            ],
        }


def export_onnx(model: str | Path, out: str | Path, targets: Iterable[str] = ()) -> Exported:
    """Write the quantized matrices of ``model`` that match one of ``targets`` (all without) to ``out``.

    Raises UsageError when nothing is quantized or nothing matches, InputError for sources that contradict themselves.
    """
    patterns = [Pattern.parse(text) for text in ([targets] if isinstance(targets, str) else targets)]
    found: dict[str, QTensor] = {}
    with open_model(model) as checkpoint:
        opened = open_coded(checkpoint)
        for module in opened.modules:
            if not isinstance(opened.entries[module.tensor], Logical):
                continue
            if patterns and not any(pattern.matches(module) for pattern in patterns):
                continue
            for name, coded in opened.coded(module):
                why = next(
                    (why for piece, why in IMMOVABLE.items() if coded.how.part(piece) is not None), None
                )
                if why is not None:
                    raise UsageError(f"ONNX cannot express {name}: {why}", where=model)
                rows = coded.rows(checkpoint, 0, coded.shape[0])
                outer = coded.outer(checkpoint)
                found[name] = qtensor(rows, coded.how.scheme, coded.how.packing, coded.shape[1], outer)
    if not found:
        raise UsageError(
            "no quantized matrix to export", where=model, got=", ".join(p.text for p in patterns) or "a plain model",
            remedy="quantize it first; `narrowcast inspect` shows what it holds",
        )  # fmt: skip
    path = export(found, out)
    size = sum(p.stat().st_size for p in (path, path.with_name(path.name + ".data")) if p.exists())
    return Exported(path, size, {name: (q.scheme.name, q.shape) for name, q in found.items()})
