"""``narrowcast serve`` with a real engine: python engines/serve.py MODEL.

MODEL, a BF16 checkpoint, is quantized (w4a16), served by vLLM's CPU build through ``narrowcast serve``, asked for one
completion over HTTP, and stopped. It fails when the engine does not serve, when what its log says that runs is not what
was planned, when the cache does not hold the tokens that were asked for, or when anything is left running.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / ".bench" / "engines"
ENGINE = ROOT / ".venv-engine" / "bin" / "python"
NARROWCAST = ROOT / ".venv" / "bin" / "narrowcast"
CONTEXT, PATIENCE = 128, 300  # tokens; seconds until it serves
NAME, PROMPT = "served", "The capital of France is"


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def completion(port: int) -> str:
    """What the server says next."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    asked = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(asked, timeout=PATIENCE) as answered:
        return str(json.load(answered)["choices"][0]["text"])


def document(file: Path) -> dict[str, Any] | None:
    """The record, once it is whole."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return None
    return found


def serve(model: Path) -> tuple[dict[str, Any] | None, str, int, str]:
    """The record, the completion, the exit code and the log of one server."""
    port = free_port()
    words = ["serve", model, "--python", ENGINE, "--gpu", "cpu", "--context", str(CONTEXT), "--name", NAME]
    words += ["--host", "127.0.0.1", "--port", str(port), "--json", "--", "--enforce-eager"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            server = subprocess.Popen(
                list(map(str, [NARROWCAST, *words])), stdout=stdout, stderr=stderr, env=environment
            )
        start, text = time.monotonic(), ""
        try:
            while document(out) is None and server.poll() is None and time.monotonic() - start < PATIENCE:
                time.sleep(0.5)
            if server.poll() is None and document(out) is not None:
                text = completion(port)
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            code = server.wait(90)
        return document(out), text, code, err.read_text(errors="replace")


def left(model: Path) -> list[str]:
    """Processes that still name the model."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(model) in words and "api_server" in words:
            found.append(words)
    return found


def problems(record: dict[str, Any] | None, text: str, code: int, model: Path) -> list[str]:
    """What is not as it was planned."""
    if record is None or record.get("running") is None or not text:
        return ["it never served"]
    found = [
        f"{row['kind']}: {row['planned']} was planned, {row['running']} runs"
        for row in record["beside"]
        if row["same"] is False
    ]
    (size,) = (row["running"] for row in record["beside"] if row["kind"] == "KV cache size")
    if int(size.split()[0].replace(",", "")) < CONTEXT:
        found.append(f"the cache holds {size}, and {CONTEXT} were asked for")
    if not any(row["kind"] == "linear kernel" for row in record["beside"]):
        found.append("no kernel was told")
    if code:
        found.append(f"exit code {code} after SIGTERM")
    return found + [f"left running: {words}" for words in left(model)]


def main() -> int:
    model = SCRATCH / "serve-w4a16"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").is_file():
        words = [NARROWCAST, "quantize", sys.argv[1], model, "--preset", "w4a16", "--quiet"]
        subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
    record, text, code, log = serve(model)
    wrong = problems(record, text, code, model)
    if wrong:
        print(log, *wrong, sep="\n", file=sys.stderr)
        return 1
    assert record is not None
    for row in record["beside"]:
        print(f"{row['kind']:16} planned {row['planned']:20} running {row['running']}")
    print(f"served: {PROMPT}{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
