"""Repair: what is wrong in a checkpoint and has one right answer, written into a new checkpoint.

    OUT = MODEL with some tensors renamed, added or written anew, and some keys of its configs

Codes are never touched. A mend is one function that looks at the checkpoint and notes changes in a ``Draft``; where
the answer is not the only one, or the values are lost, nothing is guessed and the report says what to run instead.

    config        the quantization config, rebuilt from the tensors where it contradicts them
    ignore        the list of layers that are kept, rebuilt from the tensors
    fused_outer   one outer scale for layers that engines load as one
    kv_names      scales of the KV cache under the names of the checkpoint's container
    unity_kv      scales of 1.0 for a KV cache that has none, only when told to
    index         the index of the shards, which every output gets anew
"""
