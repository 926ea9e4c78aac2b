"""What the flags of engines are made of: one row for each flag, from what is asked to a value with its reason.

    row(asked)  →  value and reason, or None where the flag is not needed

An engine's rows stand in ``vllm``, ``sglang`` and ``tensorrt_llm``, in the order of the command line,
each with the file of the engine that defines it. A flag that would only repeat the engine's default is left out, unless
the default differs between versions or the plan's numbers rest on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

from narrowcast.serving.question import Question
from narrowcast.serving.served import Served


@dataclass(frozen=True)
class Asked:
    """What flags are made from: the model and the question, and what was settled before: ``model`` is what the engine
    loads, ``quantization`` the engine's name for quantizing while loading, ``kv`` its word for the cache, ``dtype`` one
    that the config does not give; each None where the engine finds it out alone. ``ue8m0``: the config says that scales
    are powers of two, however they are stored."""

    served: Served
    question: Question
    model: str
    quantization: str | None = None
    kv: str | None = None
    dtype: tuple[str, str] | None = None
    port: int | None = None
    host: str | None = None
    name: str | None = None
    gpus_per_node: int = 8
    ue8m0: bool = False

    @property
    def world(self) -> int:
        """GPUs that one copy of the model takes."""
        return self.question.tp * self.question.pp

    @property
    def nodes(self) -> int:
        """Machines that they are in."""
        return ceil(self.world / self.gpus_per_node)

    @property
    def context(self) -> int:
        """Tokens of a sequence, as many as the model has positions for."""
        return min(self.question.context, self.served.geometry.positions or self.question.context)

    @property
    def on_cpu(self) -> bool:
        return self.question.gpu.vendor == "cpu"


@dataclass(frozen=True)
class Given:
    """A flag's value, "" for a switch, and why it is given."""

    value: str
    reason: str


@dataclass(frozen=True)
class Flag:
    """A flag of the command, or a variable of its environment, with its reason and where the engine defines it."""

    name: str
    value: str
    reason: str
    source: str

    @property
    def words(self) -> tuple[str, ...]:
        """What it is on the command line."""
        return (self.name, self.value) if self.value else (self.name,)


@dataclass(frozen=True)
class Row:
    """A flag, what gives it a value, and the file of the engine that defines it."""

    name: str
    give: Callable[[Asked], Given | None]
    source: str

    def flag(self, asked: Asked) -> Flag | None:
        given = self.give(asked)
        return None if given is None else Flag(self.name, given.value, given.reason, self.source)


def _none(asked: Asked) -> Mapping[str, str]:
    return {}


def _no_lines(asked: Asked) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Dialect:
    """How an engine is started. ``program`` is the command and ``module`` the Python module that does the same, where
    the model has the flag ``model_flag``. ``online`` is its name for making a preset from an unquantized checkpoint
    while loading, with the compute capability from which it does. ``gone`` are flags and variables that it had, with
    what does the same now; ``files`` are written before the start, by name; ``before`` are lines to run first;
    ``port`` is where it listens by itself."""

    engine: str
    version: str
    program: tuple[str, ...]
    module: str
    model_flag: str
    rows: tuple[Row, ...]
    environment: tuple[Row, ...] = ()
    online: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[Asked], Mapping[str, str]] = _none
    before: Callable[[Asked], tuple[str, ...]] = _no_lines
    port: int = 8000


def parallel(asked: Asked, name: str) -> Given | None:
    """The tensor-parallel size, where it is not one."""
    tp = asked.question.tp
    return Given(str(tp), f"each layer is shared by {tp} {name}") if tp > 1 else None


def pipeline(asked: Asked, name: str) -> Given | None:
    """The pipeline-parallel size, where it is not one."""
    pp = asked.question.pp
    return Given(str(pp), f"the layers are shared by {pp} groups of {name}") if pp > 1 else None


def experts(asked: Asked) -> str | None:
    """Why experts are spread whole, or None."""
    if not asked.question.ep or not asked.served.geometry.experts:
        return None
    return f"routed experts are spread over the {asked.question.tp} GPUs whole instead of each being cut"


def context(asked: Asked) -> Given | None:
    """The longest sequence."""
    asking, positions = asked.question.context, asked.served.geometry.positions
    if asked.context < asking:
        return Given(
            str(asked.context), f"the model has {positions} positions, fewer than the {asking} asked for"
        )
    if asking == positions:
        return Given(str(asking), "all positions of the model")
    of = f" of the model's {positions}" if positions is not None else ""
    return Given(
        str(asking), f"the longest sequence that is planned{of}; a longer one keeps more of the cache"
    )


def sequences(asked: Asked) -> Given | None:
    """How many sequences at once, where a number was asked for."""
    batch = asked.question.batch
    return Given(str(batch), f"{batch} sequences at once, as planned") if batch > 1 else None


def value(asked_value: object, reason: str) -> Given | None:
    """A value that was passed in, or None."""
    return None if asked_value is None else Given(str(asked_value), reason)
