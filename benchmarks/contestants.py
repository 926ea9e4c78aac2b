"""The commands that turn a checkpoint directory into a quantized one, ours and the peers'.

llm-compressor is run on both of its paths, through a transformers model and model-free; limits compare with
the faster. llama.cpp's quantizer starts from a GGUF of the same tensors, made beforehand and not timed.
Embeddings and lm_head stay BF16 for every contestant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import NARROWCAST, PEERS, ROOT, Run, clear, durable, run, warm

SCRIPTS = ROOT / "benchmarks" / "peers"


@dataclass(frozen=True)
class Contestant:
    """A name, the command without its last two paths, and what it reads."""

    name: str
    command: tuple[str | Path, ...]
    source: Path
    out: Path
    options: tuple[str, ...] = ()

    def argv(self) -> list[str | Path]:
        """The whole command line."""
        return [*self.command, self.source, self.out, *self.options]


def copy(source: Path, out: Path) -> Contestant:
    """``cp -r``, the speed limit of any tool that reads and writes files."""
    return Contestant("cp -r", ("cp", "-r"), source, out)


def narrowcast(source: Path, out: Path, preset: str, threads: int) -> Contestant:
    """Ours, self-check included."""
    options = ("--preset", preset, "--workers", str(threads), "--json")
    return Contestant(f"narrowcast {preset}", (NARROWCAST, "quantize"), source, out, options)


def llm_compressor(source: Path, out: Path, scheme: str, threads: int) -> list[Contestant]:
    """Both of its paths; the model-free one has workers that each quantize a shard."""
    name = f"llm-compressor {scheme}"
    shards = (scheme, str(threads))
    return [
        Contestant(f"{name} oneshot", (PEERS, SCRIPTS / "oneshot.py"), source, out, (scheme,)),
        Contestant(f"{name} model-free", (PEERS, SCRIPTS / "ptq.py"), source, out, shards),
    ]


def llama_cpp(gguf: Path, out: Path, kind: str, threads: int) -> Contestant:
    """llama.cpp's quantizer."""
    options = (kind, str(threads))
    return Contestant(f"llama.cpp {kind}", (PEERS, SCRIPTS / "llama_quantize.py"), gguf, out, options)


def make_gguf(source: Path, out: Path) -> Path:
    """The GGUF of ``source`` that llama.cpp starts from; an existing one is kept."""
    if not out.exists():
        run([PEERS, SCRIPTS / "to_gguf.py", source, out], 2)
    return out


def check_seconds(output: str) -> float:
    """Seconds of the self-check, as ``narrowcast quantize --json`` reports them."""
    return float(json.loads(output)["seconds"]["check"])


def take_turns(contestants: Sequence[Contestant], rounds: int, threads: int) -> dict[str, list[Run]]:
    """Every contestant once per round on warm files, in an order that starts one further each round."""
    found: dict[str, list[Run]] = {c.name: [] for c in contestants}
    for turn in range(rounds):
        at = turn % len(contestants)
        for one in [*contestants[at:], *contestants[:at]]:
            clear(one.out)
            warm(one.source)
            found[one.name].append(durable(one.argv(), one.out, threads))
            clear(one.out)
    return found
