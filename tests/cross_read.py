"""Reading our own output back, for comparison with the libraries that read it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowcast.containers import compressed_tensors as container
from narrowcast.jobs.plan import Plan
from narrowcast.kernels.reference.dequantize import dequantize
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.store.safetensors import Reader


def ours_as_the_library_decodes(out: Path, settled: Plan) -> Iterator[tuple[str, Any]]:
    """Every quantized matrix read back by us and decoded in the library's arithmetic: (module, float32)."""
    for shard in settled.shards:
        with Reader(out / shard.name) as reader:
            for unit in shard.units:
                n, k = unit.source.shape
                rows = container.read_rows(reader, unit.module, unit.how, (n, k), 0, n)
                outer = container.read_outer(reader, unit.module, unit.how)
                q = qtensor(rows, unit.how.scheme, unit.how.packing, k, outer)
                yield unit.module, dequantize(q, as_="compressed-tensors")
