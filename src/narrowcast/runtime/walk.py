"""Run a causal language model layer by layer: a layer's weights are in memory while all documents pass through it.

    h₀ = embed(ids);   h_{i+1} = layer_i(h_i);   logits = head(h_L)

Each layer is read once and let go, so the peak is one layer, whatever the model, and two models can walk side by side.
How a layer is called (masks, rotary tables, windows) is asked of the model itself: its forward is run once with layers
that only write down their arguments, and once more at the end with layers that hand over the last hidden states, so
that final norms, heads and soft caps are the model's own too.

    run = Running.open(path);  states = [run.begin(ids) for ids in documents]
    for i in range(run.depth):
        layer = run.layer(i)
        for state in states: run.step(layer, i, state)
    logits = run.logits(state)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.coded import Opened, open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.runtime.names import Names
from narrowcast.runtime.online import Online
from narrowcast.runtime.outer import fill_outer
from narrowcast.runtime.product import Operand
from narrowcast.runtime.skeleton import decoder_layers, skeleton
from narrowcast.runtime.spool import Spool
from narrowcast.runtime.twins import Shared, twin
from narrowcast.runtime.weights import Weights, fill
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import some

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MERGED = "fused layers hold scales that differ; they run with one scale each, as vLLM loads them"
_SHARED = Shared()
# What a model's forward ends in when its layers are not what it expects.
_ODD = (IndexError, RuntimeError, ValueError, TypeError, AttributeError)


class State:
    """One document on its way: token ids [1, T], hidden states [1, T, H], and how each layer is called.

    ``spooled`` moves the hidden states into a file: they are read when asked for, and written when set.
    """

    def __init__(self, ids: torch.Tensor, hidden: torch.Tensor, calls: list[dict[str, Any]]) -> None:
        self.ids, self.calls = ids, calls
        self._hidden: torch.Tensor | None = hidden
        self._spool: Spool | None = None

    @property
    def hidden(self) -> torch.Tensor:
        if self._hidden is not None:
            return self._hidden
        assert self._spool is not None
        return self._spool.get(id(self))

    @hidden.setter
    def hidden(self, value: torch.Tensor) -> None:
        if self._spool is None:
            self._hidden = value
        else:
            self._spool.put(id(self), value)

    def spooled(self, spool: Spool) -> Self:
        """This state, from now on with its hidden states on disk."""
        spool.put(id(self), self.hidden)
        self._hidden, self._spool = None, spool
        return self


@dataclass
class Running:
    """A checkpoint that runs: the skeleton, its weights, and the dtype of the residual stream. ``notes`` says in
    sentences what of the checkpoint or the text is not as a model expects it."""

    root: Path
    opened: Opened
    model: Any
    weights: Weights
    dtype: torch.dtype
    path: str
    layers: nn.ModuleList
    notes: list[str] = field(default_factory=list)
    _outer: bool = field(default=False, repr=False)
    _tuples: bool = field(default=False, repr=False)
    _rotary: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list, repr=False)

    @classmethod
    def open(
        cls,
        model: str | Path,
        dtype: str | None = None,
        online: str | None = None,
        attention: str | None = None,
    ) -> Self:
        """Open a model to run. ``dtype`` None is the config's own, bfloat16 where it says nothing; ``attention`` names
        an implementation of ``runtime.attend`` or of transformers, None is transformers' own choice.

        Raises UsageError and InputError as ``open_model`` does, UsageError for what transformers does not know or this
        cannot walk, CheckpointError where the tensors are not those of the model.
        """
        checkpoint = open_model(model)
        try:
            opened = open_coded(checkpoint)
            chosen = dtype or said_dtype(checkpoint.config or {})
            if chosen not in DTYPES:
                raise UsageError("unknown dtype", got=chosen, wanted=", ".join(DTYPES))
            made = skeleton(checkpoint.config, DTYPES[chosen], checkpoint.root)
            if attention is not None:
                from narrowcast.runtime.attend import attend_in

                attend_in(made, attention)
            path, layers = decoder_layers(made, checkpoint.root)
            names = Names(made, checkpoint.root)
            weights = Weights(opened, DTYPES[chosen], Online(online) if online else None, names)
        except BaseException:
            checkpoint.close()
            raise
        run = cls(checkpoint.root, opened, made, weights, DTYPES[chosen], path, layers)
        run._rotary = [
            (module, twin(module).__dict__)
            for module in made.modules()
            if hasattr(module, "max_seq_len_cached") and not hasattr(module, "self_attn")
        ]
        if run.unused:
            run.notes.append(
                f"{len(run.unused)} tensors of the checkpoint belong to no parameter of {type(made).__name__} and are "
                f"not used: {some(list(run.unused), 3)}"
            )
        run.notes += [
            f"{head} is not stored and the config does not tie it: the embedding stands in for it"
            for head in run.weights.borrowed
        ]
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.checkpoint.close()

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def stops(self) -> Any:
        """The ids that end a text, as generation takes them. CheckpointError for a damaged generation_config.json."""
        from transformers import GenerationConfig

        return _generation(self.root, GenerationConfig.from_model_config(self.config)).eos_token_id

    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that no parameter of the model took."""
        return self.weights.unused

    def _fill_outer(self) -> None:
        """Everything but the decoder layers: embeddings, final norm, head."""
        if not self._outer:
            fill_outer(self.model, self.path, self.weights)
            self._outer = True

    def _check(self, ids: torch.Tensor) -> None:
        vocabulary, positions = self.config.vocab_size, getattr(self.config, "max_position_embeddings", None)
        if ids.numel() == 0:
            raise UsageError("a text without a token cannot be run", where=self.root)
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise UsageError(
                "a token id is not in the model's vocabulary", where=self.root,
                got=int(ids.max()) if int(ids.min()) >= 0 else int(ids.min()), wanted=f"0 to {vocabulary - 1}",
                remedy="use the tokenizer of this model",
            )  # fmt: skip
        if positions and ids.numel() > positions:
            if any(
                isinstance(one, nn.Embedding) and one.num_embeddings < vocabulary for one in self._inputs()
            ):
                raise UsageError(
                    "the text is longer than the model has positions", where=self.root, got=f"{ids.numel()} tokens",
                    wanted=f"{positions} or fewer", remedy="a smaller context",
                )  # fmt: skip
            note = f"a text is longer than the {positions} positions that the config names"
            if note not in self.notes:
                self.notes.append(note)

    def _inputs(self) -> Iterator[nn.Module]:
        """Modules in front of the decoder layers and behind them."""
        inside = {id(module) for module in self.layers.modules()}
        return (module for module in self.model.modules() if id(module) not in inside)

    @torch.no_grad()
    def begin(self, ids: torch.Tensor) -> State:
        """Token ids [T] or [1, T] as the state before the first layer.

        Raises UsageError for ids beyond the vocabulary, and where the model does not call its layers one by one.
        """
        ids = ids.reshape(1, -1)
        self._check(ids)
        self._fill_outer()
        try:
            first, calls = self._written_down(ids)
        except _ODD as why:
            self._tuples = not self._tuples  # a family whose layers return tuples fails on a tensor
            try:
                first, calls = self._written_down(ids)
            except _ODD:
                raise UsageError(
                    "this model cannot be walked layer by layer", where=self.root,
                    got=f"{type(self.model).__name__}: {why}".split("\n")[0][:200],
                ) from why  # fmt: skip
        return State(ids, first, calls)

    def _written_down(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """What enters the first layer, and the arguments of every layer beside the hidden states."""
        calls: list[dict[str, Any]] = []
        first: list[torch.Tensor] = []
        memo: dict[int, Any] = {}

        def write_down(i: int, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(type(self.layers[i]).forward).bind(None, *args, **kwargs)
            said = dict(bound.arguments)
            own, hidden = list(said)[:2]
            extra = said.pop(_keywords(type(self.layers[i]).forward), {})
            said.pop(own)
            hidden = said.pop(hidden)
            if hidden.shape[:2] != ids.shape or len(calls) != i:
                raise ValueError("layers are not called one after the other with [1, T, H]")
            first.append(hidden)
            calls.append(_SHARED.of(said | extra, memo))
            return (hidden,) if self._tuples else hidden

        with self._instead(write_down):
            self._call(ids, 1)
        if len(calls) != self.depth or any(one is not first[0] for one in first):
            raise ValueError("it does more between its layers than hand hidden states on")
        return first[0], calls

    def _call(self, ids: torch.Tensor, last: int) -> Any:
        """The model's own forward. Rotary tables start as they were: those that grow with the longest text seen would
        make a result depend on what ran before."""
        for module, fresh in self._rotary:
            kept = {key: value.copy() if isinstance(value, dict) else value for key, value in fresh.items()}
            vars(module).update(kept)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=last)

    def layer(self, i: int) -> nn.Module:
        """Decoder layer ``i`` with its weights: a copy, which the caller lets go."""
        made = fill(twin(self.layers[i]), f"{self.path}.{i}", self.weights)
        if self.weights.merged and MERGED not in self.notes:
            self.notes.append(MERGED)
        return made

    @torch.no_grad()
    def step(self, layer: nn.Module, i: int, state: State, cache: Any = None) -> torch.Tensor:
        """Take a state through layer ``i`` (in place) and return its hidden states; ``cache`` is a transformers
        Cache that keeps the keys and values of this document."""
        kwargs = state.calls[i]
        if cache is not None:
            kwargs = kwargs | {"cache": cache}
        try:
            out = layer(state.hidden, **kwargs)
        except AttributeError as error:
            if Operand.__name__ not in str(error):
                raise
            raise UsageError(
                "this family computes with a linear layer's weight itself, which is not done here", where=self.root,
                got=type(layer).__name__,
            ) from error  # fmt: skip
        found: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
        state.hidden = found
        return found

    @torch.no_grad()
    def logits(self, state: State, last: int = 0) -> torch.Tensor:
        """Logits float32 [T, V] of a state that went through every layer; ``last`` > 0: of so many last tokens."""
        self._fill_outer()
        hidden = state.hidden
        with self._instead(lambda i, *args, **kwargs: (hidden,) if self._tuples else hidden):
            out = self._call(state.ids, last)
        found: torch.Tensor = out.logits[0].float()
        return found

    @contextmanager
    def _instead(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Decoder layers that do something else for a while."""
        for i, layer in enumerate(self.layers):
            layer.forward = partial(forward, i)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def resident(self) -> Any:
        """The whole model with all its weights in memory, for generation: transformers' own class, with the end of
        text that the checkpoint's generation_config.json names. Embeddings and head are the ones of this walk."""
        self._fill_outer()
        whole: Any = twin(self.model)
        layers = whole.get_submodule(self.path)
        for i in range(self.depth):
            layers[i] = self.layer(i)
        whole.generation_config = _generation(self.root, whole.generation_config)
        return whole.eval()


def _keywords(forward: Callable[..., Any]) -> str:
    """The name of a function's ``**kwargs``, empty if it has none."""
    kinds = inspect.signature(forward).parameters.values()
    return next((one.name for one in kinds if one.kind is inspect.Parameter.VAR_KEYWORD), "")


def _generation(root: Path, made: Any) -> Any:
    """Special tokens of a generation_config.json in what the config alone gave; nothing else of it, so that decoding
    stays greedy unless it is asked otherwise."""
    from transformers import GenerationConfig

    if (root / "generation_config.json").is_file():
        try:
            said = GenerationConfig.from_pretrained(root)
        except Exception as error:  # whatever a damaged file makes it do
            raise CheckpointError(
                "generation_config.json cannot be read", where=root, got=str(error).split("\n")[0][:200],
                remedy="copy it again, or remove it",
            ) from error  # fmt: skip
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(said, key) is not None:
                setattr(made, key, getattr(said, key))
    return made


def said_dtype(config: dict[str, Any]) -> str:
    """The dtype that a config.json names, bfloat16 where it names none that a model runs in."""
    inner = text_config(config)
    for said in (
        config.get("dtype"),
        config.get("torch_dtype"),
        inner.get("dtype"),
        inner.get("torch_dtype"),
    ):
        if said in DTYPES:
            return str(said)
    return "bfloat16"
