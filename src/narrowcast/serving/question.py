"""What is asked: the engine, the GPUs, how long sequences are and how many run at once."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import engines
from narrowcast.hardware.gpus import GPU

UTILISATION = 0.9  # of a GPU's memory that an engine takes by default (vLLM --gpu-memory-utilization of 2025)


@dataclass(frozen=True)
class Question:
    """``tp`` GPUs share each layer, ``pp`` groups of them share the layers; with ``ep`` routed experts are spread over
    the ``tp`` GPUs one by one. ``context`` tokens of each of ``batch`` sequences are held at once. ``kv`` is a mode of
    the KV cache by name (auto: the model's dtype, or what the checkpoint asks for). ``utilisation`` of each GPU's
    memory is for weights and cache; the rest is for everything else."""

    gpu: GPU
    engine: str = "vllm"
    tp: int = 1
    pp: int = 1
    ep: bool = False
    context: int = 8192
    batch: int = 1
    kv: str = "auto"
    utilisation: float = UTILISATION

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", engines[self.engine].name)  # in whatever case it was typed
        for name in ("tp", "pp", "context", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", got=getattr(self, name))
        if not 0 < self.utilisation <= 1:
            raise UsageError("the utilisation is a share of memory", got=self.utilisation, wanted="0 to 1")
