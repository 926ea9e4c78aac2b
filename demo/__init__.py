"""The demo: a real language model from BF16 to FP8, INT4 and NVFP4, loaded by an outside library,
talking.

Run it with ``make demo``. It is a user of narrowcast like any other: it calls the command line, and
nothing in the package imports it.
"""
