"""What verbs that run models need to be installed."""

from __future__ import annotations

from importlib.util import find_spec

from narrowcast.errors import UsageError


def check_libraries() -> None:
    """Say what is missing before anything is read. UsageError without torch or transformers."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise UsageError(f"running models needs {name}", remedy='pip install "narrowcast[run]"')
