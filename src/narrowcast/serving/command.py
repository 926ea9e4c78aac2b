"""The command that serves a model as it was planned, each flag with its reason: ``command``.

    narrowcast plan ... → question  →  vllm serve MODEL --max-model-len ... | sglang serve ... | trtllm-serve ...

Every flag is a row of the engine's dialect (``serving/flags``), looked up in the
engine at the version named there. A preset that the engine makes while it loads becomes its own name for it; another
preset is quantized first, by a line that stands before the command. What the engine would refuse is said here, with
its reason, before a server has loaded for minutes to say the same.

Left out: flags of speed alone (graphs, chunked prefill, scheduling), which do not change what a model computes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import engines
from narrowcast.serving import settling
from narrowcast.serving.flags import Asked, Dialect, Flag
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served

DIALECTS: Mapping[str, str] = {
    "vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt_llm",
}  # fmt: skip
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Command:
    """How to start the engine. ``flags`` are the command's own and ``extra`` the user's, ``variables`` the environment;
    ``files`` by name are written beside it first, ``before`` are lines to run first. A command with ``refusals`` will
    not serve; ``warnings`` tell what is probably not meant."""

    engine: str
    version: str
    program: tuple[str, ...]
    module: str
    model_flag: str
    model: str
    flags: tuple[Flag, ...]
    extra: tuple[str, ...] = ()
    variables: tuple[Flag, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    port: int = 8000
    host: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Everything behind the model."""
        return (*(word for flag in self.flags for word in flag.words), *self.extra)

    @property
    def argv(self) -> tuple[str, ...]:
        """The command, word by word."""
        return (*self.program, self.model, *self.options)

    def in_python(self, python: str) -> tuple[str, ...]:
        """The same by a Python interpreter that has the engine, whatever its command is called there."""
        model = (self.model_flag, self.model) if self.model_flag else (self.model,)
        return (python, "-m", self.module, *model, *self.options)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that are set for it."""
        return {flag.name: flag.value for flag in self.variables}

    def lines(self) -> list[str]:
        """The command as people paste it into a shell, a flag on each line."""
        first = " ".join(
            [*(f"{name}={quoted(value)}" for name, value in self.environment.items()), *self.program]
        )
        parts = [f"{first} {quoted(self.model)}", *(_joined(flag.words) for flag in self.flags)]
        parts += [_joined(self.extra)] if self.extra else []
        return [*(f"{part} \\" for part in self._indented(parts[:-1])), *self._indented(parts)[-1:]]

    @staticmethod
    def _indented(parts: Sequence[str]) -> list[str]:
        return [f"  {part}" if i else part for i, part in enumerate(parts)]

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {
            "engine": self.engine,
            "version": self.version,
            "argv": list(self.argv),
            "environment": self.environment,
            "files": dict(self.files),
            "before": list(self.before),
            "flags": [vars(flag) for flag in (*self.flags, *self.variables)],
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
        }


def dialect(engine: str) -> Dialect:
    """How the engine is started. UsageError for one without a server."""
    row = engines[engine]
    if row.name not in DIALECTS:
        raise UsageError(f"{row.title} has no server command here", wanted=", ".join(DIALECTS))
    found: Dialect = import_module(f"narrowcast.serving.flags.{DIALECTS[row.name]}").DIALECT
    return found


def command(
    served: Served,
    question: Question,
    *,
    port: int | None = None,
    host: str | None = None,
    name: str | None = None,
    extra: Sequence[str] = (),
    quantization: str | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    environment: Mapping[str, str] | None = None,
) -> Command:
    """The command that serves ``served`` as ``question`` asks.

    ``extra`` are flags of the engine as the user writes them; one that is ours as well replaces ours. ``quantization``
    is the engine's own name, where the user knows it. ``environment`` is looked through for variables that the engine
    no longer reads. UsageError for a name that the engine does not know, or no longer takes for this.
    """
    spoken = dialect(question.engine)
    question, renamed = settling.today(spoken, question)
    config = settling.config_of(served)
    how = settling.quantization(spoken, served, question, quantization)
    made = how.made
    asked = Asked(
        served, question, made or _folder(served.name), how.word, settling.cache(spoken, served, question),
        settling.dtype(served, question, config), port, host, name, gpus_per_node,
        settling.powers_of_two(config),
    )  # fmt: skip
    typed = {word.partition("=")[0] for word in extra if word.startswith("-")}
    flags = [flag for row in spoken.rows if (flag := row.flag(asked)) is not None and flag.name not in typed]
    variables = [flag for row in spoken.environment if (flag := row.flag(asked)) is not None]
    first = () if made is None else (_quantize(served, made),)
    return Command(
        spoken.engine, spoken.version, spoken.program, spoken.module, spoken.model_flag, asked.model,
        tuple(flags), tuple(extra), tuple(variables), spoken.files(asked), (*first, *spoken.before(asked)),
        tuple(settling.refusals(asked, flags, typed)),
        (*how.said, *renamed, *_without_weights(served, made),
         *settling.warnings(asked, spoken, config, extra, environment or {})), port or spoken.port, host,
    )  # fmt: skip


def _folder(name: str) -> str:
    """What an engine takes for a model: of a config file its folder."""
    return str(Path(name).parent) if name.endswith(".json") else name


def quoted(word: str) -> str:
    """A word as a shell reads it back; what a terminal does not show is spelled as $'...' does (bash, zsh, ksh)."""
    if word.isprintable():
        return shlex.quote(word)
    spelled = (
        f"\\{c}"
        if c in "\\'"
        else c
        if c.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in c.encode(errors="surrogateescape"))
        for c in word
    )
    return f"$'{''.join(spelled)}'"


def _joined(words: Sequence[str]) -> str:
    return " ".join(quoted(word) for word in words)


def _without_weights(served: Served, made: str | None) -> Iterator[str]:
    """A warning where only a config lies there."""
    folder = Path(_folder(served.name))
    if made is None and folder.is_dir() and not any(folder.glob("*.safetensors")):
        yield f"there are no weights in {folder}: the engine will find nothing to load"


def _quantize(served: Served, made: str) -> str:
    """The line that makes the checkpoint first."""
    words = ["narrowcast", "quantize", _folder(served.name), made, "--preset", str(served.preset)]
    words += [] if served.container == "compressed-tensors" else ["--container", served.container]
    return _joined(words)
