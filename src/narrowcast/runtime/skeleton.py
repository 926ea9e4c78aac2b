"""A model's code without its weights: transformers' own definition, every parameter on torch's meta device.

    skeleton(config) → module tree, names as in the checkpoint, buffers (rotary tables, embedding scales) real

Weights are put into parts of it when they are needed (``weights.fill``), so that a model larger than memory can be
walked layer by layer. Buffers that no weight file holds are computed by the model's own initializer; one that stays
unset is refused instead of run.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.store.checkpoint import text_config


def skeleton(config: Mapping[str, Any] | None, dtype: torch.dtype, where: object = "model") -> nn.Module:
    """The causal language model of a config.json, in ``dtype``, on meta.

    Raises UsageError where transformers has no such model, or no causal language model of it.
    """
    if not config:
        raise UsageError(
            "to run a model its config.json is needed", where=where, remedy="point to its directory"
        )
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    said = dict(text_config(config))
    said.pop("quantization_config", None)
    family = said.get("model_type") or config.get("model_type")
    if family not in CONFIG_MAPPING:
        raise UsageError(
            "transformers has no model of this type",
            where=where,
            got=family,
            remedy="a newer transformers may",
        )
    said.pop("dtype", None), said.pop("torch_dtype", None)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = CONFIG_MAPPING[family].from_dict(said)
            model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            "transformers cannot build this model", where=where, got=str(error).split("\n")[0][:200],
            remedy="look at config.json, or try a newer transformers",
        ) from error  # fmt: skip
    _compute_buffers(model, where)
    return model.eval()


def _compute_buffers(model: Any, where: object) -> None:
    """Real buffers in place of those on meta."""
    for name, module in model.named_modules():
        own = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for key in own:
            shape, dtype = module._buffers[key].shape, module._buffers[key].dtype
            fill = float("nan") if dtype.is_floating_point else 0
            module._buffers[key] = torch.full(shape, fill, dtype=dtype)
        if own:
            with torch.no_grad():
                model._init_weights(module)
        for key in own:
            if module._buffers[key].isnan().any():
                raise CheckpointError(
                    f"nothing sets the buffer {name}.{key}", where=where, got=type(module).__name__
                )


def decoder_layers(model: nn.Module, where: object = "model") -> tuple[str, nn.ModuleList]:
    """The path and the list of decoder layers. UsageError where there is no one such list."""
    config: Any = model.config
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(found) != 1:
        raise UsageError(
            "no single list of decoder layers",
            where=where,
            got=", ".join(name for name, _ in found) or "none",
        )
    return found[0]
