"""The doctor: what a start-up log says in plain words, and what the symptoms people see may come from.

    diagnose(lines)   what runs, what is wrong with it, what the log does not say; Reader, line by line
    symptoms          what people see, with causes, checks and remedies; find(text) by words

Both are tables: a line that an engine prints is one row (``vllm_*``, ``sglang``, ``tensorrt_llm``, ``any_engine``),
what lines say together another (``conjunctions``). Nothing is concluded from a line that is not there: what a whole
log would have is listed as not said.

Left out: reading metrics and request logs, which tell how fast and not what runs; and guessing a kernel from the GPU.
"""

from narrowcast.doctor.lines import read
from narrowcast.doctor.reading import Reader, diagnose
from narrowcast.doctor.report import Finding, Report, Running
from narrowcast.doctor.symptoms import Cause, Symptom, find, symptoms

__all__ = [
    "Cause",
    "Finding",
    "Reader",
    "Report",
    "Running",
    "Symptom",
    "diagnose",
    "find",
    "read",
    "symptoms",
]
