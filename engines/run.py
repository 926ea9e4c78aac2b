"""Which files an engine loads, tried for real: python engines/run.py MODEL [--containers ...] [--presets ...]
[--accept].

Every preset without calibration is written from MODEL in every container that can spell it, and given to vLLM's
CPU build
(``load.py``), each in a process of its own with a time limit. What loads is held against narrowcast's own
decoding of the
same file: the file converted to plain BF16 goes through the same engine, and greedy tokens and their
log-probabilities
are compared. They differ by what the engine's kernels do with activations and accumulators, so the differences are
recorded; a difference of more than one nat means that the engine computes another model, and fails the test.

What the engine said is compared with engines/results.json, where verdicts are kept by instruction set, since
the wheel's
three compiled parts accept different things. A file that used to load and no longer does, or the other way round,
fails the test, unless --accept records it. docs/engines.md is the table of the file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import BF16
from narrowcast.tensors.presets import presets

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "engines" / "results.json"
PAGE = ROOT / "docs" / "engines.md"
SCRATCH = ROOT / ".bench" / "engines"
ENGINE = ROOT / ".venv-engine" / "bin" / "python"
NARROWCAST = ROOT / ".venv" / "bin" / "narrowcast"
PROMPT = "The capital of France is"
TOKENS = 8
# fp16 first: the bf16 kernels of this build compute integer weights up to 1.6 nats away from any decoding of them,
# where its fp16 ones agree within some hundredths. Some kernels take bf16 only.
DTYPES = ("float16", "bfloat16")
LIMIT = 900  # seconds for one file
USAGE = 2  # narrowcast's exit code for what cannot be asked
ANOTHER_MODEL = 1.0  # nats between the log-probabilities of the same token

Verdict = dict[str, Any]


class NotWritten(Exception):
    """narrowcast itself failed, so the engine has nothing to judge."""


class NotForThisModel(Exception):
    """The container cannot hold this model, and narrowcast says why."""


def load(model: Path, dtype: str) -> Verdict:
    """What the engine says of one checkpoint directory, when it computes in ``dtype``."""
    argv = [ENGINE, ROOT / "engines" / "load.py", model, PROMPT, str(TOKENS), dtype]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"loads": False, "message": f"no answer within {LIMIT} s"}
    last = done.stdout.strip().rpartition("\n")[2]
    if last.startswith('{"engine"'):
        return dict(json.loads(last))
    if done.returncode < 0:
        return {"loads": False, "message": f"the engine died of {signal.Signals(-done.returncode).name}"}
    lines = done.stderr.strip().splitlines() or ["no output"]
    return {"loads": False, "message": lines[-1]}


def narrowcast(out: Path, *words: str | Path) -> Path:
    """Run narrowcast for a fresh directory; raises NotWritten with our own message."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    for path in (out, out.with_name(f"{out.name}.partial")):
        shutil.rmtree(path, ignore_errors=True)
    done = subprocess.run([NARROWCAST, *words], capture_output=True, text=True, check=False)
    if done.returncode == USAGE:
        raise NotForThisModel(done.stderr.strip().splitlines()[0].removeprefix("narrowcast: error: "))
    if done.returncode:
        raise NotWritten(f"narrowcast {' '.join(map(str, words))} failed:\n{done.stderr.strip()}")
    return out


def trial(model: Path, container: str, preset: str) -> Verdict:
    """Write, load, and hold what loads against our own decoding of the same file."""
    name = f"{container}-{preset}"
    source = narrowcast(
        SCRATCH / name, "quantize", model, SCRATCH / name, "--preset", preset, "--container", container
    )
    start = time.perf_counter()
    verdict, dtype = {}, ""
    for dtype in DTYPES:
        verdict = load(source, dtype) | {"dtype": dtype}
        if verdict["loads"]:
            break
    if verdict["loads"]:
        plain = narrowcast(
            SCRATCH / f"{name}-plain", "convert", source, SCRATCH / f"{name}-plain", "--to", "plain"
        )
        verdict |= beside(verdict, load(plain, dtype))
        verdict |= {"ours": running(source, dtype, verdict)}
        shutil.rmtree(plain)
    shutil.rmtree(source)
    said = f"loads: {verdict['text']!r}" if verdict["loads"] else f"refused: {verdict['message']}"
    print(f"{name:28} {time.perf_counter() - start:4.0f} s  {said[:100]}", flush=True)
    return verdict


def beside(verdict: Verdict, decoded: Verdict) -> Verdict:
    """Tokens that agree with our decoding of the file, and the largest difference of their log-probabilities."""
    same = agreement(verdict, decoded)
    count = int(same.partition("/")[0])
    pairs = list(zip(verdict["logprobs"], decoded["logprobs"], strict=False))
    differences = [abs(a - b) for a, b in pairs[: max(count, 1)]]
    return {"decoded": same, "nats": round(max(differences), 4)}


def running(source: Path, dtype: str, verdict: Verdict) -> float:
    """The largest difference between the engine's log-probabilities and those of narrowcast's own run of the file,
    which is given the engine's tokens."""
    import torch
    from transformers import AutoTokenizer

    from narrowcast.runtime.walk import Running

    torch.set_num_threads(2)
    tokens = verdict["tokens"]
    prompt = AutoTokenizer.from_pretrained(source)(PROMPT)["input_ids"]
    with Running.open(source, dtype) as run:
        state = run.begin(torch.tensor([*prompt, *tokens]))
        for i in range(run.depth):
            run.step(run.layer(i), i, state)
        logs = run.logits(state).log_softmax(-1)[len(prompt) - 1 : -1]
    ours = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return round(max(abs(a - b) for a, b in zip(verdict["logprobs"], ours, strict=True)), 4)


def agreement(verdict: Verdict, other: Verdict) -> str:
    """How many of the first tokens are the other's, of how many."""
    pairs = list(zip(verdict["tokens"], other["tokens"], strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"{same}/{len(pairs)}"


def spelled(container: str, preset: str) -> bool:
    """Whether the container can hold the preset at all."""
    spelling = containers[container].spelling
    if spelling is None:
        return False
    try:
        spelling(presets[preset].linear, BF16)
    except UsageError:
        return False
    return True


def changes(known: dict[str, Verdict], found: dict[str, Verdict]) -> list[str]:
    """Files whose verdict is no longer the recorded one, and those that compute another model."""
    changed = [
        f"{name}: was {'loaded' if known[name]['loads'] else 'refused'}, now "
        + ("loads" if verdict["loads"] else f"refused ({verdict['message']})")
        for name, verdict in found.items()
        if name in known and known[name]["loads"] != verdict["loads"]
    ]
    strange = [
        f"{name}: log-probabilities are {verdict['nats']} nats from those of narrowcast's own decoding"
        for name, verdict in found.items()
        if verdict["loads"] and verdict["nats"] > ANOTHER_MODEL
    ]
    return changed + strange


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/engines.md: one table per engine, version and instruction set."""
    lines = [
        "# What engines load",
        "",
        "Generated by `make engine-test`, which writes SmolLM2-135M with every preset that needs no calibration in",
        f"every container that can spell it, loads each result in the engine, and continues “{PROMPT}”",
        f"greedily by {TOKENS} tokens, or by one where the engine has no fast kernel for it on this CPU.",
        "“parent” counts the first tokens that are the BF16 parent's. “decoded” counts those of the same file",
        "converted to plain BF16 by narrowcast and run by the same engine; “nats” is the largest difference of their",
        "log-probabilities, and “ours” that from narrowcast's own run of the file (`narrowcast evaluate`), which",
        "quantizes inputs as the file says. Layers compute in fp16 where the engine lets them, else in bf16.",
        "A refusal is quoted in the engine's words. What engines call things, and what newer versions of them changed,",
        "is in [engine_names.md](engine_names.md).",
    ]
    for result in results.values():
        title = f"{result['engine']} {result['version']}, {result['instructions']}"
        lines += [
            "",
            f"## {title}",
            "",
            "| container | preset | verdict | dtype | parent | decoded | nats | ours | text or message |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for name, verdict in result["files"].items():
            container, _, preset = name.partition("/")
            said = f"`{verdict['text']!r}`" if verdict["loads"] else verdict["message"][:300]
            figures = [str(verdict.get(key, "")) for key in ("dtype", "same", "decoded", "nats", "ours")]
            word = "loads" if verdict["loads"] else "refused"
            cells = [container, preset, word, *figures, said.replace("|", "\\|")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def record(results: dict[str, Any], parent: Verdict, found: dict[str, Verdict]) -> None:
    """Merge what was found into engines/results.json and write the page."""
    about = {key: parent[key] for key in ("engine", "version", "instructions")}
    keep = ("loads", "dtype", "text", "same", "decoded", "nats", "ours", "message")
    rows = {name: {k: v[k] for k in keep if k in v} for name, v in found.items()}
    old = results.get(parent["instructions"], {}).get("files", {})
    results[parent["instructions"]] = {**about, "files": dict(sorted({**old, **rows}.items()))}
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(page(results))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every verdict is the recorded one or new, 1 when one changed, computes another model, or we failed."""
    parser = argparse.ArgumentParser(description="which files vLLM's CPU build loads")
    parser.add_argument("model", type=Path)
    free = [name for name, preset in presets.items() if not preset.calibrated]
    parser.add_argument("--presets", nargs="+", default=free)
    parser.add_argument("--containers", nargs="+", default=list(containers))
    parser.add_argument("--accept", action="store_true", help="record changed verdicts instead of failing")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parent = load(options.model, DTYPES[0])
    if not parent["loads"]:
        print(f"the engine does not load the BF16 parent: {parent['message']}", file=sys.stderr)
        return 1
    known = results.get(parent["instructions"], {}).get("files", {})
    found: dict[str, Verdict] = {}
    failures = []
    for container, preset in [(c, p) for c in options.containers for p in options.presets if spelled(c, p)]:
        try:
            verdict = trial(options.model, container, preset)
        except NotForThisModel as refusal:
            print(f"{container}-{preset}: not written, {refusal}", flush=True)
            continue
        except NotWritten as failure:
            failures.append(str(failure))
            continue
        if verdict["loads"]:
            verdict["same"] = agreement(verdict, parent)
        found[f"{container}/{preset}"] = verdict
        if options.accept or not changes(known, found):
            record(
                results, parent, found
            )  # after each, so that a run of an hour that is stopped was not for nothing
    changed = changes(known, found)
    if (changed and not options.accept) or failures:
        print(
            "\n".join(["what engines/results.json does not say (--accept records it):", *changed, *failures]),
            file=sys.stderr,
        )
        return 1
    record(results, parent, found)
    loaded = sum(v["loads"] for v in found.values())
    print(
        f"{loaded} of {len(found)} load in {parent['engine']} {parent['version']} ({parent['instructions']})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
