"""A fact hidden in filler and asked for at the end, by length of the text and depth of the fact.

    score of an answer = Σ log p(its tokens | text);   solved when the right one of ``CHOICES`` has the largest

Likelihoods instead of written answers: they need no parsing, tell a small loss from a large one, and a small base model
that would not stop at the answer can be asked too. By luck one of CHOICES is right; a model at that level tells nothing
about long contexts, and a comparison of two such models tells less. Only lengths that the model's positions allow run.

Left out: several facts at once, and facts that look like the filler.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from narrowcast.runtime.walk import Running
from narrowcast.studies.evaluation import Retrieval, RetrievalCell
from narrowcast.studies.tokens import Tokens

CHOICES, TASKS = 4, 4
LENGTHS, DEPTHS = (256, 512, 1024, 2048), (0.1, 0.5, 0.9)
LUCK = 1 / CHOICES
PLACES = ("harbour", "library", "market", "garden", "station", "museum", "bakery", "bridge")
WORDS = ("amber", "copper", "violet", "silver", "olive", "scarlet", "ivory", "indigo")
FILLER = (
    "The road follows the river for a while and then turns away from it. ",
    "In the evening the windows are lit one after another. ",
    "Nobody could say how long the wall had been standing there. ",
    "A cart went by, and the dust settled slowly behind it. ",
    "The lists were copied by hand and kept in a drawer. ",
    "On some days the wind came from the hills. ",
)


def lengths_of(run: Running) -> list[int]:
    """Lengths that the model has positions for."""
    allowed = int(getattr(run.config, "max_position_embeddings", 0) or max(LENGTHS))
    return [length for length in LENGTHS if length <= allowed] or [allowed]


def tasks(tokens: Tokens, length: int, depth: float) -> list[tuple[list[int], list[list[int]]]]:
    """Token ids of TASKS texts of about ``length`` tokens, and of the answers of each, the right one first."""
    found = []
    for number in range(TASKS):
        rng = random.Random(f"{length} {depth} {number}")
        place = rng.choice(PLACES)
        answers = rng.sample(WORDS, CHOICES)
        needle = f"The password of the {place} is {answers[0]}. "
        question = f"\nThe password of the {place} is"
        ids = tokens.ids("".join(rng.choice(FILLER) for _ in range(length // 8)))
        hidden, asked = tokens.ids(needle, bare=True), tokens.ids(question, bare=True)
        ids = ids[: max(length - len(hidden) - len(asked) - 4, 0)]
        at = int(depth * len(ids))
        found.append(
            (ids[:at] + hidden + ids[at:] + asked, [tokens.ids(f" {word}", bare=True) for word in answers])
        )
    return found


@torch.inference_mode()
def solved(model: Any, ids: Sequence[int], answers: Sequence[Sequence[int]]) -> bool:
    """Whether the first answer is the most likely: the text once, then each answer's tokens behind it."""
    scores = []
    out = model(input_ids=torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
    for answer in answers:
        score = float(torch.log_softmax(out.logits[0, -1].float(), 0)[answer[0]])
        if len(answer) > 1:
            whole = model(
                input_ids=torch.tensor([[*ids, *answer[:-1]]]),
                use_cache=False,
                logits_to_keep=len(answer) - 1,
            )
            rows = torch.log_softmax(whole.logits[0].float(), 1)
            score += sum(float(row[token]) for row, token in zip(rows, answer[1:], strict=True))
        scores.append(score)
    return scores[0] > max(scores[1:])


def retrieval(models: dict[str, Running], tokens: Tokens) -> Retrieval:
    """Both models over lengths and depths; one model in memory at a time."""
    grid = [(length, depth) for length in lengths_of(models["child"]) for depth in DEPTHS]
    counts: dict[str, list[int]] = {}
    for name, run in models.items():
        model = run.resident()
        counts[name] = [
            sum(solved(model, ids, answers) for ids, answers in tasks(tokens, length, depth))
            for length, depth in grid
        ]
        del model
    cells = tuple(
        RetrievalCell(length, depth, TASKS, counts["parent"][i] if "parent" in counts else None, counts["child"][i])
        for i, (length, depth) in enumerate(grid)
    )  # fmt: skip
    return Retrieval(CHOICES, cells, _says(cells))


def _says(cells: Sequence[RetrievalCell]) -> str:
    total = sum(cell.tasks for cell in cells)
    child = sum(cell.child for cell in cells)
    parent = sum(cell.parent for cell in cells if cell.parent is not None)
    if cells[0].parent is None:
        return f"{child} of {total} found; {LUCK:.0%} would be luck"
    if max(child, parent) / total < 2 * LUCK:
        return f"both near luck ({parent} and {child} of {total}, {LUCK:.0%} is luck): tells nothing"
    return f"parent {parent}, child {child} of {total}; {LUCK:.0%} would be luck"
