"""What an engine makes of an unquantized model while it loads it: ``--quantization NAME``, answered as for a file.

    online(served, "vllm", "fp8_per_block", gpu)  →  the same model, its linear layers FP8 in blocks
    kernels_online(served, question, ...)         →  the kernels that they would run on

Embeddings, the output head, routers and norms stay as they are. Weights are made on each rank from its own part, which
tells a scale per tensor of several ranks apart from that of a file; nothing here depends on it.

Source: the rows of ``narrowcast.hardware.names``.
"""

from __future__ import annotations

from dataclasses import replace

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import ENGINES, Path
from narrowcast.hardware.gpus import GPU
from narrowcast.hardware.names import EITHER, METHOD, ONLINE, Name, find, rows
from narrowcast.model.roles import Role
from narrowcast.serving.paths import Kernels, kernels
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.tensors.presets import EXCLUDED_ROLES, LinearScheme
from narrowcast.tensors.schemes import schemes

# Whose rows say which kernels a scheme has when it is made while loading.
_KERNELS_OF = {
    ("vllm", "fp8_tensor"): "fp8", ("vllm", "fp8_block128"): "fp8", ("sglang", "mxfp8_e4m3"): "modelopt",
    ("vllm", "nf4_b64"): "bitsandbytes", ("sglang", "nf4_b64"): "bitsandbytes",
}  # fmt: skip
# vLLM refuses Marlin for this name, and NVFP4 elsewhere than on 10.x (both raise while the layer is built).
_NO_WEIGHT_ONLY = frozenset({("vllm", "fp8_per_channel")})
_ONLY_10X = frozenset({("vllm", "nvfp4_per_token"), ("sglang", "nvfp4_online")})


def method(engine: str, name: str) -> Name:
    """The row of a name that quantizes while loading. UsageError for one that there is not, or that only reads."""
    row = find(name, engine, METHOD)[0]
    if row.does not in (ONLINE, EITHER) or not row.weights:
        known = [each.name for each in _online(engine)]
        raise UsageError(
            f"{ENGINES[engine]} quantizes nothing under this name while loading", got=name, wanted=", ".join(known),
            remedy=f"instead: {row.instead}" if row.instead else None,
        )  # fmt: skip
    return row


def _online(engine: str) -> list[Name]:
    return [row for row in rows(engine, METHOD) if row.does in (ONLINE, EITHER) and row.weights]


def scheme(row: Name, gpu: GPU) -> LinearScheme:
    """What the name makes of a layer on this GPU: of several inputs for one weight the first where CUTLASS multiplies
    FP8 (from compute capability 8.9), else the last; of several weights the first."""
    weights, inputs = row.weights.split(" or "), row.inputs.split(" or ")
    cutlass = gpu.sm is not None and gpu.sm >= 89
    chosen = inputs[0] if cutlass or len(weights) == len(inputs) else inputs[-1]
    accumulate = "int32" if weights[0].startswith("int8") else "fp32"
    return LinearScheme(
        schemes[weights[0]], None if chosen == "wide" else schemes[chosen], True, accumulate
    )  # fmt: skip


def online(served: Served, engine: str, name: str, gpu: GPU) -> Served:
    """The model as the engine would hold it, bytes and all. UsageError for a checkpoint that is quantized already."""
    row = method(engine, name)
    if served.quantized:
        raise UsageError(
            "the checkpoint is quantized already",
            got=f"--quantization {name}",
            wanted="an unquantized checkpoint",
        )
    linear = scheme(row, gpu)
    container = _KERNELS_OF.get((engine, linear.weight.name), "compressed-tensors")
    groups = tuple(_made(group, row, linear) for group in served.groups)
    return replace(
        served,
        container=container,
        groups=groups,
        notes=(*served.notes, f"{row.flag} {row.name}: {row.means}"),
    )


def _made(group: Group, row: Name, linear: LinearScheme) -> Group:
    matrix = group.matrix
    experts = "experts" in row.only
    if matrix.role in EXCLUDED_ROLES or (experts and matrix.role is not Role.EXPERT):
        return group
    if linear.weight.inner.tile[0] == 1 and matrix.shape[1] % (linear.weight.group or 1):
        return group
    return group.held_in(linear)


def kernels_online(served: Served, question: Question, name: str) -> tuple[Kernels, ...]:
    """The kernels of a model that is quantized while loading; see ``kernels``."""
    row = method(question.engine, name)
    found = kernels(online(served, question.engine, name, question.gpu), question)
    return tuple(each if each.conditions is None else _refused(each, row, question.gpu) for each in found)


def _refused(found: Kernels, row: Name, gpu: GPU) -> Kernels:
    """The answer, or the refusal of the name where the GPU or the kernel is not what it asks for."""
    key, path = (row.engine, row.name), found.path
    reason = None
    if path.refusal is None and row.low is not None and gpu.sm is not None and gpu.sm < row.low:
        low = f"{row.low // 10}.{row.low % 10}"
        reason = f"{row.flag} {row.name} asks for compute capability {low}"
    elif path.refusal is None and key in _NO_WEIGHT_ONLY and not path.low_precision:
        reason = row.says
    elif key in _ONLY_10X and (gpu.sm is None or gpu.sm // 10 != 10):
        reason = row.says or f"{row.flag} {row.name} needs compute capability 10.x"
    if reason is None:
        return found
    refused = Path(
        path.engine, path.version, (), "unknown", False, reason, found.change[0] if found.change else None, (),
        path.source,
    )  # fmt: skip
    return replace(found, path=refused, verdict="refused", why=(f"kernel: {reason}",))
