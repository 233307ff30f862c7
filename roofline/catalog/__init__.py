"""What is known by name or read from files: model shapes, GPUs, calibration profiles.

Not here: what anything costs; nothing in this folder multiplies FLOPs by bytes.
"""
