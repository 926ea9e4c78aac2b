"""Hardware: accelerators and what engines make of a checkpoint on them, as rows of data with a version and a source.

    gpus             what each accelerator is and multiplies natively; own_gpus: a user's own rows
    machine          the accelerator, or the processor, that this machine has; host, bandwidth: its memory
    cost             what bytes and products take at least on one of them
    engines          container × scheme × accelerator → kernels in order, arithmetic, or the refusal and its reason
    attention        the same for attention over a KV cache in one of cache_modes
    names            what engines call methods, caches and kernels, and what the names mean
    tensor_parallel  which splits keep blocks, groups and packed words whole
    caches           which names of KV cache scales each engine reads
    overflow         model families whose activations leave the range of fp16

What is not known is None, or said; nothing but ``machine`` and ``bandwidth`` measures.
"""
