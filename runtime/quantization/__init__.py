"""4-bit draft weights: GPTQ, its calibration text, and the quantized draft model.

Not here: the format and its kernels (kernels/linear), quantized keys and values (kernels/kv_cache).
"""
