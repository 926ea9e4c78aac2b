"""A worker process that holds the weight and times one call when asked, so that two environments can take
turns.

Protocol, one JSON object a line: the driver writes {"row", "contestant"}, the worker answers {"seconds",
"cpu"} or {"error"}. The first object a worker writes lists its contestants by row. The driver skips what
libraries print.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Calls = Mapping[str, Mapping[str, Callable[[], Any]]]


def serve(calls: Calls, warmups: Calls | None = None) -> None:
    """Answer requests until stdin ends. A contestant's first request first runs its warm-up, untimed.

    A warm-up may be a cheaper call (a few rows) where nothing is compiled for the shape; without one the call
    itself is run once.
    """
    print(json.dumps({row: list(names) for row, names in calls.items()}), flush=True)
    ready: set[tuple[str, str]] = set()
    for line in sys.stdin:
        request = json.loads(line)
        key = (request["row"], request["contestant"])
        call = calls[key[0]][key[1]]
        try:
            if key not in ready:
                (warmups or {}).get(key[0], {}).get(key[1], call)()
                ready.add(key)
            start, used = time.perf_counter(), time.process_time()
            result = call()
            seconds, cpu = time.perf_counter() - start, time.process_time() - used
            del result
            print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)
        except Exception as problem:
            text = str(problem).strip().splitlines() or [type(problem).__name__]
            print(json.dumps({"error": f"{type(problem).__name__}: {text[0][:200]}"}), flush=True)
