"""The KV cache of a generation, and the metadata by which a forward pass reads and writes it.

Not here: the kernels that read, quantize and move keys and values (kernels/kv_cache, kernels/attention).
"""
