"""What is known by name or read from files: model shapes, GPUs, calibration profiles.

Not here: costs and times (roofline).
"""
