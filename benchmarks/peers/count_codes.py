"""The least that a look at every byte takes with the safetensors package: codes counted by numpy, amax of floats by
torch, which has the dtypes."""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open


def main() -> None:
    """Read a checkpoint tensor by tensor."""
    torch.set_num_threads(int(sys.argv[2]))
    counts, amax = np.zeros(256, np.int64), 0.0
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - an open file is no mapping
                tensor = file.get_tensor(name)
                if tensor.element_size() == 1 or not tensor.is_floating_point():
                    codes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                    counts += np.bincount(codes, minlength=256)
                elif tensor.numel():
                    amax = max(amax, float(tensor.abs().max()))
    print(int(counts.sum()), amax)


if __name__ == "__main__":
    main()
