"""Times single kernels beside other people's, their reference and a target: `ridgeplan bench kernels`.

Not here: whole decoding steps (validate/decode_bench), rates for predictions (validate/calibration).
"""
