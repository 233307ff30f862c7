"""4-bit and 8-bit weights of drafts and of the target: GPTQ, its calibration text, and the quantized models.

Not here: the format and its kernels (kernels/linear), quantized keys and values (kernels/kv_cache).
"""
