"""Mixers that keep a state instead of keys: Mamba, Mamba 2, gated delta nets, short convolutions.

    elements kept per sequence       the convolution's                  the recurrence's
    Mamba                            inner · (kernel − 1)               inner · state
    Mamba 2                          (inner + 2 · groups · state)       heads · dim · state
                                       · (kernel − 1)
    gated delta net                  (2 · keys + values) · (kernel − 1) value heads · key dim · value dim
    Kimi's delta attention           3 · heads · dim · (kernel − 1)     heads · dim · dim
    short convolution                hidden · (kernel − 1)              nothing

as vLLM's state shapes have it (model_executor/layers/mamba/mamba_utils.py). The convolution's state is in the model's
dtype. The recurrence's is too, unless the config says mamba_ssm_dtype (Qwen3.5) or mamba_ssm_cache_dtype; of
Nemotron-H and Kimi Linear vLLM keeps it in fp32 when the config says nothing. A user's switch can change both.

Heads and inner channels are split over GPUs by the columns of the steps in and the rows of the step out. Convolutions,
time steps and decays are vectors here: kernels of their own read them, and no format touches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.model.families.blocks import Decoder
from narrowcast.model.families.fields import DTYPES, Fields
from narrowcast.model.geometry import Split
from narrowcast.model.roles import Role


def kept_dtype(fields: Fields, default: str | None = None) -> str | None:
    """The dtype that the config asks engines to keep recurrent states in."""
    name = fields.spelled("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    value = fields.value(name)
    if value is None or value == "auto":
        return default
    if not isinstance(value, str) or value not in DTYPES:
        fields.refuse(name, " or ".join(DTYPES))
    return DTYPES[value]


def _project(
    model: Decoder, name: str, rows: Sequence[int], width: int, layers: int, split: Split, *, heads: int = 0,
    bias: bool = False,
) -> None:  # fmt: skip
    pieces = rows if len(rows) > 1 else ()
    model.linear(name, Role.SSM, (sum(rows), width), layers, split, heads=heads, bias=bias, pieces=pieces)


@dataclass(frozen=True)
class Mamba2:
    """The fields of a Mamba 2 mixer by name. ``norm``: the switch of the norm before the step out, or its presence;
    ``out``: the switch of the bias of the step out; ``dtype`` that of the state where the config is silent."""

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    states: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    out: str = ""
    norm: str = ""
    dtype: str | None = None

    def width(self, fields: Fields, hidden: int, heads: int) -> int:
        """The width of one head; "auto": as many as expand · hidden has for each."""
        if fields.value(self.dim) not in (None, "auto"):
            return fields.count(self.dim)
        inner = fields.maybe("mamba_d_ssm") or fields.count(fields.spelled("mamba_expand", "expand")) * hidden
        return fields.divided(self.heads, inner, heads)

    def add(self, model: Decoder, layers: int, prefix: str) -> None:
        """The mixer of ``layers`` layers and its states."""
        fields, hidden = model.fields, model.hidden
        heads, groups, states, kernel = (
            fields.count(name) for name in (self.heads, self.groups, self.states, self.kernel)
        )
        dim = self.width(fields, hidden, heads)
        inner, bias = heads * dim, fields.flag(self.bias)
        channels = inner + 2 * groups * states
        rows = (inner, inner, groups * states, groups * states, heads)
        _project(model, prefix + "in_proj", rows, hidden, layers, "column", heads=heads, bias=bias)
        out = fields.flag(self.out) if self.out else bias
        _project(model, prefix + "out_proj", (hidden,), inner, layers, "row", heads=heads, bias=out)
        normed = fields.flag(self.norm) if self.norm else True
        taps = kernel + fields.flag(self.conv_bias, True)
        model.vectors += layers * (channels * taps + 3 * heads + inner * normed)
        dtype = kept_dtype(fields, self.dtype)
        model.state(layers, channels * (kernel - 1), heads * dim * states, dtype=dtype)


@dataclass(frozen=True)
class Mamba:
    """The fields of a first Mamba mixer by name. ``norms``: time step, B and C each have a norm (Jamba)."""

    states: str = "state_size"
    kernel: str = "conv_kernel"
    expand: str = "expand"
    rank: str = "time_step_rank"
    conv_bias: str = "use_conv_bias"
    bias: str = "use_bias"
    norms: bool = False

    def add(self, model: Decoder, layers: int, prefix: str) -> None:
        """The mixer of ``layers`` layers and its states."""
        fields, hidden = model.fields, model.hidden
        states, kernel = fields.count(self.states), fields.count(self.kernel)
        inner, bias = fields.count(self.expand) * hidden, fields.flag(self.bias)
        rank = -(-hidden // 16) if fields.value(self.rank) == "auto" else fields.count(self.rank)
        _project(model, prefix + "in_proj", (inner, inner), hidden, layers, "column", bias=bias)
        _project(model, prefix + "x_proj", (rank + 2 * states,), inner, layers, "row")
        _project(model, prefix + "dt_proj", (inner,), rank, layers, "column", bias=True)
        _project(model, prefix + "out_proj", (hidden,), inner, layers, "row", bias=bias)
        taps = kernel + fields.flag(self.conv_bias, True)
        norms = rank + 2 * states if self.norms else 0
        model.vectors += layers * (inner * (taps + states + 1) + norms)
        model.state(layers, inner * (kernel - 1), inner * states, dtype=kept_dtype(fields))


def delta_net(model: Decoder, layers: int, leaves: Sequence[Sequence[str]]) -> None:
    """A gated delta net. ``leaves``: names on disk and the parts that each holds, of q k v z (as one or two
    matrices) and of b a. The pieces say how many rows a part has; Qwen3-Next's files hold them key head by key head."""
    fields, hidden = model.fields, model.hidden
    keys, values, kd, vd, kernel = (
        fields.count(f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    fields.divided("linear_num_key_heads", values, keys)
    size = {"q": keys * kd, "k": keys * kd, "v": values * vd, "z": values * vd, "b": values, "a": values}
    for leaf, parts in leaves:
        heads = values if parts in ("z", "b", "a") else keys
        _project(
            model,
            f"linear_attn.{leaf}",
            [size[part] for part in parts],
            hidden,
            layers,
            "column",
            heads=heads,
        )
    _project(model, "linear_attn.out_proj", (hidden,), values * vd, layers, "row", heads=values)
    channels = 2 * keys * kd + values * vd
    model.vectors += layers * (channels * kernel + 2 * values + vd)
    model.state(layers, channels * (kernel - 1), values * kd * vd, dtype=kept_dtype(fields))


def kimi_delta(model: Decoder, layers: int, heads: int, dim: int, kernel: int) -> None:
    """Kimi's delta attention: a decay for each channel and a gate, both from ``dim`` elements in between."""
    hidden, wide = model.hidden, heads * dim
    rows: list[tuple[str, tuple[int, int], Split]] = [
        *((f"{part}_proj", (wide, hidden), "column") for part in "qkv"),
        ("b_proj", (heads, hidden), "column"),
        *((f"{part}_a_proj", (dim, hidden), "whole") for part in "fg"),
        *((f"{part}_b_proj", (wide, dim), "column") for part in "fg"),
        ("o_proj", (hidden, wide), "row"),
    ]
    for leaf, shape, split in rows:
        count = 0 if split == "whole" else heads
        model.linear(f"self_attn.{leaf}", Role.ATTENTION, shape, layers, split, heads=count)
    model.vectors += layers * (3 * wide * kernel + heads + wide + dim)
    model.state(layers, 3 * wide * (kernel - 1), heads * dim * dim, dtype=kept_dtype(model.fields, "fp32"))


def short_convolution(model: Decoder, layers: int) -> None:
    """LFM2's gated short convolution: three parts in, a few taps, one out."""
    fields, hidden = model.fields, model.hidden
    kernel, bias = fields.count("conv_L_cache"), fields.flag("conv_bias")
    _project(model, "conv.in_proj", (hidden,) * 3, hidden, layers, "column", bias=bias)
    _project(model, "conv.out_proj", (hidden,), hidden, layers, "row", bias=bias)
    model.vectors += layers * hidden * (kernel + bias)
    model.state(layers, hidden * (kernel - 1), 0)
