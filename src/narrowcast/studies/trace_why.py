"""Why one element of an output is as large as it is: which weight row, which input channel, which operand.

linear     y[c] = Σ_k x[k] · w[c, k]: the largest term and its share of the sum; the row's norm beside the median's
residual   the stream and what is added to it
act*up     the two factors;   norm   what came in and the weight
q·k        head, and which token's key
"""

from __future__ import annotations

import torch

from narrowcast.runtime import operations as op
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.operations import Operation
from narrowcast.studies.trace_counts import rows


def explain(
    operation: Operation, inputs: tuple[torch.Tensor, ...], tokens: int, row: int, channel: int
) -> str:
    """A sentence about element (row, channel) of an output, "" where there is nothing to say.

    ``row`` and ``channel`` are those of ``rows(output, tokens, kind)``.
    """
    if operation.kind in (op.LINEAR, op.LOGITS) and isinstance(operation.module, ScaledLinear):
        return _linear(operation.module, inputs[0].reshape(-1, inputs[0].shape[-1])[row].float(), channel)
    if operation.kind == op.SCORES:
        head, key = divmod(channel, tokens)
        return f"head {head}, with the key of token {key}"
    parts = [rows(part, tokens, operation.kind) for part in inputs if part.ndim > 1]
    values = [float(part[row, channel]) for part in parts if row < len(part) and channel < part.shape[1]]
    if operation.kind == op.RESIDUAL and len(values) == 2:
        return f"{values[0]:.4g} in the stream, {values[1]:.4g} added"
    if operation.kind == op.PRODUCT and len(values) == 2:
        return f"{values[0]:.4g} times {values[1]:.4g}"
    if operation.kind == op.NORM and values:
        weight = getattr(operation.module, "weight", None)
        said = (
            f", weight {float(weight[channel % len(weight)]):.4g}"
            if weight is not None and weight.ndim == 1
            else ""
        )
        return f"{values[0]:.4g} came in{said}" if operation.name.count("_") else ""
    return ""


def _linear(module: ScaledLinear, x: torch.Tensor, channel: int) -> str:
    """The row of weights, and the product that counts most."""
    weight = module.weight.decoded()
    row = weight[channel]
    norms = torch.linalg.vector_norm(weight, dim=1)
    terms = x * row
    total = float(terms.sum())
    k = int(terms.abs().nan_to_num(0.0, 0.0, 0.0).argmax())
    ratio = float(norms[channel] / norms.median())
    said = f"weight row {channel} ({ratio:.3g} x the median row's norm); the sum is {total:.5g}"
    if total == 0 or total != total:
        return f"weight row {channel} ({ratio:.3g} x the median row's norm)"
    share = float(terms[k]) / total
    return f"{said}, of it {100 * share:.0f} % input channel {k}: {float(x[k]):.4g} times {float(row[k]):.4g}"
