"""The validation suite of `ridgeplan validate --suite`: kernels, steps, generations and regret, predicted and measured.

Not here: the calibration that predictions rest on (validate/calibration), whose sizes the suite does not share.
"""
