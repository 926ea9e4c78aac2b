"""The toy model that every upstream library quantizes here, and what is kept of its answer.

A fixture is one directory: the files as the library wrote them, ``decoded.npz`` with the library's own
dequantized matrices, and ``fixture.json`` saying who made it. ``decoded.npz`` maps the name of a module (or of
a stacked expert parameter) to its matrix in fp32; a library that answers in bf16 or fp16 is widened, which is
exact, and ``decoded_dtype`` keeps its own dtype.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def toy_config(
    hidden: int = 64, inner: int = 32, layers: int = 1, head_dim: int = 16, **more: Any
) -> LlamaConfig:
    """Grouped-query attention with k and v half as tall as q; no matrix of the MLP is square."""
    shape: dict[str, Any] = {
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": hidden // head_dim // 2,
    }
    return LlamaConfig(
        vocab_size=32, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, head_dim=head_dim,
        max_position_embeddings=64, tie_word_embeddings=True, **{**shape, **more},
    )  # fmt: skip


def narrow_config() -> LlamaConfig:
    """One head of 32: every side of every matrix is 32 or 64."""
    return toy_config(hidden=32, inner=64, head_dim=32, num_attention_heads=1, num_key_value_heads=1)


def fill(weight: torch.Tensor, seed: int, zeros: bool = True) -> None:
    """Normal values whose rows and 16-blocks differ in magnitude, with an outlier, a zero row and a zero block."""
    made = torch.Generator().manual_seed(seed)
    n, k = weight.shape[-2:]
    values = torch.randn(weight.shape, generator=made) * 0.05
    values *= torch.exp2(torch.randint(-2, 3, (n, 1), generator=made).float())
    values *= torch.exp2(torch.randint(-2, 2, (1, (k + 15) // 16), generator=made).float()).repeat_interleave(
        16, 1
    )[:, :k]
    values[..., 1, 2] = 1.25
    if zeros and n > 3:
        values[..., 3, :] = 0.0
        values[..., n - 1, : min(32, k)] = 0.0
    weight.copy_(values.to(weight.dtype))


def named(model: Any) -> Any:
    """What loading from a file would have left in the config."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    return model


@torch.no_grad()
def toy_model(
    dtype: torch.dtype = torch.bfloat16, config: LlamaConfig | None = None, zeros: bool = True
) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config or toy_config()).to(dtype).eval()
    for seed, parameter in enumerate(model.parameters()):
        if parameter.ndim >= 2:
            fill(parameter, seed, zeros)
    return named(model)


def calibration(count: int = 4, length: int = 12, vocab: int = 32) -> Iterator[torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randint(0, vocab, (1, length), generator=made)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """``np.load`` reads LZMA members, a quarter smaller than what ``np.savez_compressed`` writes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for key, value in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(value))
            archive.writestr(zipfile.ZipInfo(f"{key}.npy"), member.getvalue(), zipfile.ZIP_LZMA)


def keep(
    name: str, decoded: Mapping[str, torch.Tensor], made: str, decode: str, packages: tuple[str, ...]
) -> Path:
    """Write ``decoded.npz`` and ``fixture.json`` beside the files of the library."""
    where = HERE / name
    dtypes = {DTYPE_NAMES[value.dtype] for value in decoded.values()}
    if len(dtypes) != 1:
        raise SystemExit(f"{name}: decoded dtypes {dtypes}")
    write_npz(where / "decoded.npz", {key: value.detach().float().numpy() for key, value in decoded.items()})
    facts = {
        "upstream": {package: version(package) for package in packages}, "made": made, "decoded_by": decode,
        "decoded_dtype": dtypes.pop(),
    }  # fmt: skip
    (where / "fixture.json").write_text(json.dumps(facts, indent=2) + "\n")
    for extra in ("generation_config.json", "README.md", ".gitattributes"):
        (where / extra).unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in where.iterdir())
    print(f"{name}: {len(decoded)} matrices, {size} bytes")
    return where


def fresh(name: str) -> Path:
    """An empty directory for a fixture."""
    where = HERE / name
    where.mkdir(exist_ok=True)
    for old in where.iterdir():
        old.unlink()
    return where
