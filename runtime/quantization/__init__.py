"""4-bit draft weights: GPTQ, the text that they are fitted to, and the draft that comes of it.

Not here: the format and its kernels (kernels/linear), quantized keys and values (kernels/kv_cache).
"""
