"""Make layouts.npz: what other projects make of the same random bytes.

    python layouts.py torchao    with torchao 0.18 (to_blocked)
    python layouts.py vllm       with vLLM 0.32 (swizzle_blockscale, swizzle_mxfp8_scale, nvfp4_split_data_scale)
    python layouts.py sglang FILE  with SGLang 0.5.23's srt/layers/quantization/fp8_utils.py, which carries
                                 DeepGEMM's packing of UE8M0 in torch; only that function of FILE is run

Each adds its arrays under its name; ``<name>/<case>/in`` and ``<name>/<case>/out``.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).with_suffix(".npz")
SHAPES = ((1, 1), (5, 3), (130, 7), (257, 9))


def random_bytes(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(1, 255, shape, dtype=np.uint8)


def torchao() -> dict[str, Any]:
    from torchao.prototype.mx_formats.utils import to_blocked

    cases = {}
    for shape in SHAPES:
        linear = random_bytes(*shape)
        cases["sf", shape] = linear, to_blocked(torch.from_numpy(linear)).numpy()
    return cases


def vllm() -> dict[str, Any]:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale
    from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale
    from vllm.utils.torch_utils import nvfp4_split_data_scale

    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign] # the arithmetic is the same here
    cases = {}
    for shape in (*SHAPES, (2, 130, 7)):
        linear = random_bytes(*shape)
        scales = torch.from_numpy(linear).view(torch.float8_e4m3fn)
        cases["nvfp4", shape] = linear, swizzle_blockscale(scales).view(torch.uint8).numpy()
    for m, k in SHAPES:
        linear = random_bytes(m, k)
        cases["mxfp8", (m, k)] = linear, swizzle_mxfp8_scale(torch.from_numpy(linear), m, 32 * k).numpy()
    pages, heads, tokens, head = 2, 3, 8, 64
    rows = random_bytes(pages, 2, heads, tokens, head // 2 + head // 16)
    cache = torch.zeros(pages, 2, heads, tokens, rows.shape[-1], dtype=torch.uint8)
    for side in range(2):
        data, scale = nvfp4_split_data_scale(cache[:, side])
        data[:] = torch.from_numpy(rows[:, side, ..., : head // 2])
        scale.view(torch.uint8)[:] = torch.from_numpy(rows[:, side, ..., head // 2 :].copy())
    cases["kv", rows.shape] = rows, cache.reshape(pages, -1).numpy()
    return cases


def sglang(file: str) -> dict[str, Any]:
    name = "_get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl"
    tree = ast.parse(Path(file).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    sys.modules["deep_gemm"] = sys.modules["deep_gemm.utils"] = SimpleNamespace(  # type: ignore[assignment]
        align=lambda x, to: -(-x // to) * to, get_tma_aligned_size=lambda x, size: -(-x * size // 16) * 16 // size
    )  # fmt: skip
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, []), file, "exec"), scope)
    cases = {}
    for shape in (*SHAPES, (2, 130, 7)):
        linear = random_bytes(*shape)
        values = torch.from_numpy(linear.astype(np.int32) << 23).view(torch.float32)
        packed = scope[name](values)
        memory = np.array(packed.untyped_storage().tolist(), np.uint8).view(np.int32)
        cases["ue8m0", shape] = linear, memory.reshape(*shape[:-2], packed.shape[-1], packed.stride(-1))
    return cases


def main(peer: str, *arguments: str) -> None:
    made = {"torchao": torchao, "vllm": vllm, "sglang": sglang}[peer](*arguments)
    kept = dict(np.load(FILE)) if FILE.exists() else {}
    for (kind, shape), (linear, stored) in made.items():
        key = f"{peer}/{kind}/{'x'.join(map(str, shape))}"
        kept[f"{key}/in"], kept[f"{key}/out"] = linear, stored
    np.savez_compressed(FILE, **kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
