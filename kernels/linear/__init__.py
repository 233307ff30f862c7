"""Products of few rows with dense and 4-bit weights: schedules, launches, the weight's format, GPTQ's inner loop.

Not here: which layers are quantized, and to what they are fitted (runtime/quantization).
"""
