"""Reading our own output back, for comparison with the libraries that read it too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file

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
                rows = unit.how.read(reader, unit.place, (n, k), 0, n)
                outer = unit.how.outer(reader, unit.place, (n, k))
                q = qtensor(rows, unit.how.scheme, unit.how.packing, k, outer)
                yield unit.module, dequantize(q, as_="compressed-tensors")


def check_decode(out: Path, settled: Plan) -> None:
    """The library's config model, matching and decompressors give our values, bit for bit, for every matrix."""
    config = QuantizationConfig.model_validate(
        json.loads((out / "config.json").read_text())["quantization_config"]
    )
    states = {shard.name: load_file(out / shard.name) for shard in settled.shards}
    state = {name: value for part in states.values() for name, value in part.items()}
    scheme_of = {unit.module: unit.how.scheme for unit in settled.units}
    for module, ours in ours_as_the_library_decodes(out, settled):
        group = next(
            g
            for g in config.config_groups.values()
            if any(t == "Linear" or match_name(module, t) for t in g.targets)
        )
        assert group.weights.num_bits == scheme_of[module].element.bits
        compressor = BaseCompressor.get_value_from_registry(group.format)
        local = {k[len(module) + 1 :]: v for k, v in state.items() if k.startswith(f"{module}.")}
        theirs = compressor.decompress(local, group)["weight"].float().numpy()
        differ = np.argwhere(theirs.view(np.uint32) != ours.view(np.uint32))
        assert not len(differ), (
            f"{module} differs at {differ[0]}: {theirs[tuple(differ[0])]} {ours[tuple(differ[0])]}"
        )
