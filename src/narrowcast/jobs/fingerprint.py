"""Which checkpoint this is, by a hash that does not read all of it.

    fingerprint    SHA-256 over what the config says, and names, dtypes, shapes and three pages of every tensor
    kinship        SHA-256 over names and shapes of the linear layers, the norms' weights, two rows of the embedding

The first tells a model from its fine-tunes, whose every matrix is another, and not from one that differs only between
the pages. The second stays when a model is quantized, in whatever container, as long as these stay wide; so it tells
whether one model can be the quantized other. Fine-tunes that leave norms and embeddings alone share it. How the tensors
lie in shards matters to neither.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from narrowcast.jobs.coded import Opened
from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE, held
from narrowcast.model.roles import Role
from narrowcast.store.checkpoint import Checkpoint, text_config

PAGE = 4096
# Keys of a config that do not change what the model computes.
_ASIDE = ("transformers_version", "_name_or_path", "use_cache")


def fingerprint(checkpoint: Checkpoint) -> str:
    """See the module docstring; the same for a checkpoint that is cut into other shards."""
    digest = hashlib.sha256()
    config = {key: value for key, value in text_config(checkpoint.config or {}).items() if key not in _ASIDE}
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name, entry in sorted(checkpoint.entries.items()):
        said = f"{name}\0{entry.dtype.name}\0{list(entry.shape)}\n"
        digest.update(said.encode(errors="surrogateescape"))
        size = min(PAGE, entry.nbytes)
        for start in sorted({0, (entry.nbytes - size) // 2, entry.nbytes - size}):
            page = np.empty(size, np.uint8)
            checkpoint.read_into(name, page, start)
            digest.update(page.tobytes())
    return digest.hexdigest()


def kinship(opened: Opened) -> str:
    """See the module docstring; the same for a model and its quantized versions."""
    digest = hashlib.sha256()
    for name, one in sorted(held(opened).found.items()):
        if one.role in (INPUT_SCALE, CACHE_SCALE):
            continue
        if one.kind == "Linear":
            digest.update(f"{name}\0{list(one.shape)}\n".encode(errors="surrogateescape"))
        elif one.role == str(Role.NORM):
            digest.update(f"{name}\n".encode(errors="surrogateescape"))
            digest.update(one.values(0, one.source.shape[0]).astype("<f4").tobytes())
        elif one.role == str(Role.EMBEDDING) and one.coded is None:
            rows = one.source.shape[0]
            for row in (rows // 3, 2 * rows // 3):
                digest.update(one.values(row, row + 1).astype("<f4").tobytes())
    return digest.hexdigest()
