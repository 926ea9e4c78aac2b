"""KV caches that hold encoded keys and values, with the formulas of the engines that run them.

mode    codes and scales of a row      modes.py, and one file for each family
layer   rows of all tokens             layer.py
cache   layers of a model              making.py
"""

from narrowcast.runtime.caches.layer import LayerSeen, Seen
from narrowcast.runtime.caches.making import CacheFactory, CodedCache
from narrowcast.runtime.caches.modes import MODES, CacheMode, cache_mode
from narrowcast.runtime.caches.scales import KVScales

__all__ = [
    "MODES", "CacheFactory", "CacheMode", "CodedCache", "KVScales", "LayerSeen", "Seen", "cache_mode",
]  # fmt: skip
