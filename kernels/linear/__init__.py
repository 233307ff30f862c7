"""Matrix products of few rows with dense and 4-bit weights: schedules, launches, weight format, GPTQ's inner loop.

Not here: which layers are quantized, and on which calibration data (runtime/quantization).
"""
