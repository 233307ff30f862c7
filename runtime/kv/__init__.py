"""Where keys and values of a generation are kept, and what a forward pass sees of them.

Not here: the kernels that read, quantize and move them (kernels/kv_cache, kernels/attention).
"""
