"""Times single kernels against peers and a target: `ridgeplan bench kernels`.

Not here: whole decoding steps (validate/decode_bench), rates for predictions (validate/calibration).
"""
