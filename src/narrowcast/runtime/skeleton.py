"""A model's code without its weights: transformers' own definition, every parameter on torch's meta device.

    skeleton(config) → module tree, names as transformers has them, buffers (rotary tables, embedding scales) real

Weights are put into parts of it when they are needed (``weights.fill``), so that a model larger than memory can be
walked layer by layer. Buffers that no weight file holds are computed by the model's own initializer; one that stays
unset is refused instead of run. Attention is the implementation that transformers itself would choose, so that soft
caps and attention sinks are kept where only its plain implementation has them.

Code that a checkpoint brings along is never run.
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

    Raises UsageError where transformers has no such model, or no causal language model of it, CheckpointError where
    the config does not fit its own family.
    """
    if not config:
        raise UsageError(
            "to run a model its config.json is needed", where=where, remedy="point to its directory"
        )
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    said = dict(text_config(config))
    said.pop("quantization_config", None)
    family = str(said.get("model_type") or config.get("model_type") or "")
    _refuse_unknown(family, config, CONFIG_MAPPING, where)
    said.pop("dtype", None), said.pop("torch_dtype", None)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = CONFIG_MAPPING[family].from_dict(said)
            model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise UsageError(
                "transformers has no causal language model of this type", where=where, got=family,
                remedy="models of other kinds cannot be run here",
            ) from error  # fmt: skip
        raise _unbuildable(where, error) from error
    except Exception as error:  # whatever a config makes a constructor do
        raise _unbuildable(where, error) from error
    _compute_buffers(model, where)
    _keep_wide(model, dtype)
    return model.eval()


def _refuse_unknown(family: str, config: Mapping[str, Any], known: Any, where: object) -> None:
    """Refuse a model type that transformers itself has no definition of."""
    if not family:
        raise UsageError(
            "config.json names no model_type, so there is no code to run", where=where,
            wanted='a line such as "model_type": "llama"', remedy="copy the config.json of the model",
        )  # fmt: skip
    if family not in known:
        own = config.get("auto_map") or text_config(config).get("auto_map")
        raise UsageError(
            "this model brings its own code, which is not run" if own else "transformers has no model of this type",
            where=where, got=family,
            remedy="a newer transformers may have a definition of its own" if own else "a newer transformers may",
        )  # fmt: skip


def _unbuildable(where: object, error: Exception) -> CheckpointError:
    return CheckpointError(
        "transformers cannot build this model", where=where,
        got=f"{type(error).__name__}: {error}".split("\n")[0][:200],
        remedy="look at config.json, or try a newer transformers",
    )  # fmt: skip


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
        bad = [key for key in own if module._buffers[key].isnan().any()]
        bad += [
            key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if bad:
            raise UsageError(
                f"nothing sets {name}.{bad[0]}, so this model cannot be run", where=where,
                got=type(module).__name__,
            )  # fmt: skip


def _keep_wide(model: Any, dtype: torch.dtype) -> None:
    """What transformers loads as float32 whatever the dtype: DeepSeek's routers, the biases of some scores."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    patterns = build_glob_alternation(list(plan))[0]
    for path, module in model.named_modules():
        for name, value in stored(module):
            if patterns.search(f"{path}.{name}"):
                kept = module._parameters if name in module._parameters else module._buffers
                wide = value.float()
                kept[name] = nn.Parameter(wide, requires_grad=False) if kept is module._parameters else wide


def stored(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own tensors that a checkpoint holds: parameters, and buffers that are saved."""
    buffers = [one for one in module._buffers.items() if one[0] not in module._non_persistent_buffers_set]
    return [(name, one) for name, one in [*module._parameters.items(), *buffers] if one is not None]


def decoder_layers(model: nn.Module, where: object = "model") -> tuple[str, nn.ModuleList]:
    """The path and the list of decoder layers. UsageError where there is no one such list."""
    config: Any = model.config
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(found) > 1:  # lists inside the layers, experts say, may have as many members
        outer = [name for name, _ in found]
        found = [one for one in found if not any(one[0].startswith(f"{name}.") for name in outer)]
    if len(found) != 1:
        raise UsageError(
            "no single list of decoder layers",
            where=where,
            got=", ".join(name for name, _ in found) or "none",
        )
    return found[0]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer, torch's or GPT-2's transposed one, that a ``ScaledLinear`` can stand in
    for. A router that is a linear with more to its forward is none."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D or (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    )


def linear_shape(module: Any) -> tuple[int, int]:
    """(output channels, input channels) of what ``is_linear`` takes."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return module.weight.shape[1], module.weight.shape[0]
