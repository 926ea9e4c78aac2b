"""A checkpoint loaded by transformers on the CPU, talking: ``python -m demo.talk DIRECTORY "a
question"``.

compressed-tensors checkpoints load as they are: the package decodes the weights to BF16 at the first forward
pass and, where the scheme quantizes activations, rounds the inputs of every linear layer on the way. Decoding
is greedy, so two directories differ by their weights and schemes alone. These kernels show what a checkpoint
says, not how fast an engine runs it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import InputError

QUESTION = "What is the capital of France, and why is it famous?"


@dataclass(frozen=True)
class Reply:
    """A greedy continuation: its text, its token ids and the seconds that generating them took."""

    text: str
    tokens: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def silence() -> None:
    """Keep transformers offline and its notices off the screen; call before it is imported."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    from transformers.utils import logging

    logging.set_verbosity_error()


def load(directory: Path) -> tuple[Any, Any]:
    """The model in the dtype that its config names, all weights decoded, and its tokenizer.

    Raises InputError when the directory holds other tensors than the model wants.
    """
    silence()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # One token at a time is bound by memory: a second thread gains little, and waits long on a busy machine.
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars; what matters is in found, or is raised
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        model, found = loaded
        with torch.inference_mode():
            model(torch.tensor([[0]]))  # compressed weights are decoded at the first call
    if wrong := {kind: sorted(names) for kind, names in found.items() if names}:
        raise InputError("transformers does not find the tensors it wants", where=directory, got=wrong)
    return model, AutoTokenizer.from_pretrained(directory)


def reply(directory: Path, question: str, length: int = 40) -> Reply:
    """Ask through the chat template; at most ``length`` tokens, fewer where the model ends its turn."""
    model, tokenizer = load(directory)
    import torch

    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=length, do_sample=False)
    seconds = time.perf_counter() - start
    tokens = output[0, prompt["input_ids"].shape[1] :].tolist()
    return Reply(tokenizer.decode(tokens, skip_special_tokens=True).strip(), tokens, seconds)


def main(arguments: list[str]) -> int:
    if not arguments or not (Path(arguments[0]) / "config.json").is_file():
        print(
            "usage: python -m demo.talk DIRECTORY [QUESTION]   (a directory with a config.json)",
            file=sys.stderr,
        )
        return 2
    answer = reply(Path(arguments[0]), " ".join(arguments[1:]) or QUESTION)
    print(textwrap.fill(answer.text, 80))
    print(f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} per second")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
