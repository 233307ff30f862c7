"""Matrix products of few rows with dense and quantized weights: schedules, launches, GPTQ's inner loop.

Not here: which layers are quantized, and on which calibration data (runtime/quantization).
"""
