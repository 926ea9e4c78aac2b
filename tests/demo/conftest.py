from __future__ import annotations

import pytest
from gguf import GGUFReader

from demo import source


@pytest.fixture(scope="session")
def reader() -> GGUFReader:
    """The open GGUF file: parsing its hundred thousand strings takes seconds, so it is done once."""
    return source.open_gguf(source.smollm2_gguf())
