"""How long an answer without a model takes: plans, and the commands that print rows, each as a process of its own.

    python benchmarks/plan.py [--rounds 7] [MODEL]

MODEL is a BF16 directory, by default the demo's SmolLM2. Beside it are planned the configs of Llama 3 8B and DeepSeek
V3, and a checkpoint of 100 000 tensors in 100 files that hold headers and holes. Nothing else answers these questions
from a config, so the measures are Python's own start and ``import torch``, which a tool that loads models pays first.

Times are of commands that ran before: byte code is compiled, files are cached. On a machine that others use the
processor's seconds say more than the clock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import NARROWCAST, OURS, ROOT, SCRATCH, Run, busy, run, save, spread, table, verdict

LAYERS = 64  # of 256 experts, each of six tensors: 100 000 tensors
# The fields of the published configs that a plan reads.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False,
    "attention_bias": False, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SLOW, LIGHT = 1.0, 0.3  # seconds that a plan, and a command that prints rows, may take


def written(name: str, config: Mapping[str, object]) -> Path:
    """A config file of that name."""
    folder = SCRATCH / "plan" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder / "config.json"


def commands(model: Path) -> dict[str, list[str | Path]]:
    """What runs, by the name of its row."""
    shards = SCRATCH / "plan" / "shards"
    run([OURS, ROOT / "benchmarks" / "shards.py", shards, "--layers", str(LAYERS), "--hollow"], 1)
    llama = written("llama-3-8b", LLAMA)
    return {
        "python -c pass": [OURS, "-c", "pass"],
        'python -c "import numpy"': [OURS, "-c", "import numpy"],
        'python -c "import torch"': [OURS, "-c", "import torch"],
        "gpus": [NARROWCAST, "gpus"],
        "engines": [NARROWCAST, "engines"],
        "plan, Llama 3 8B's config": [NARROWCAST, "plan", llama, "--gpu", "l4"],
        "plan, the same, one preset": [NARROWCAST, "plan", llama, "--gpu", "l4", "--preset", "fp8_dynamic"],
        "plan, DeepSeek V3's config": [
            NARROWCAST, "plan", written("deepseek-v3", DEEPSEEK), "--gpu", "h200", "--tp", "8",
        ],
        "plan, SmolLM2's files": [NARROWCAST, "plan", model, "--gpu", "l4"],
        "plan, 100 000 tensors": [NARROWCAST, "plan", shards, "--gpu", "h200"],
        "serve --dry-run, SmolLM2": [NARROWCAST, "serve", model, "--gpu", "l4", "--dry-run"],
    }  # fmt: skip


def turns(every: Mapping[str, Sequence[str | Path]], rounds: int) -> dict[str, list[Run]]:
    """Every command once per round, after one that is thrown away."""
    found: dict[str, list[Run]] = {name: [] for name in every}
    for turn in range(1 + rounds):
        for name, argv in every.items():
            one = run(argv, 1)
            found[name] += [one] if turn else []
    return found


def middle(runs: Sequence[Run], processor: bool = False) -> float:
    return statistics.median(run.processor if processor else run.seconds for run in runs)


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="answers without a model")
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "demo-output" / "smollm2-bf16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(busy(), end="")
    every = commands(options.model)
    results = turns(every, options.rounds)
    torch = middle(results['python -c "import torch"'])
    rows = [
        [
            name, spread([run.seconds for run in runs]), f"{middle(runs, processor=True):.2f}",
            f"{max(run.peak_mb for run in runs):.0f}", f"{middle(runs) / torch:.2f}",
        ]
        for name, runs in results.items()
    ]  # fmt: skip
    head = ["command", "seconds (min-max)", "processor", "peak MB", "of torch"]
    print(table(f"answers without a model, {options.rounds} runs", head, rows))
    for name, runs in results.items():
        if name.startswith(("plan", "serve")):
            print(verdict(name, middle(runs), SLOW))
        elif not name.startswith("python"):
            print(verdict(name, middle(runs), LIGHT))
    seconds = {
        name: {"wall": [run.seconds for run in runs], "processor": [run.processor for run in runs]}
        for name, runs in results.items()
    }
    save("plan", {"seconds": seconds})


if __name__ == "__main__":
    main()
