"""The decoder: its weights, how checkpoints become them, a step over the cache and the prefill of a prompt.

Not here: where keys and values are kept (runtime/kv), how weights are quantized (runtime/quantization).
"""
