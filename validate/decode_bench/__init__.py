"""End-to-end decoding at a large model's size with a small model's acceptance: `ridgeplan bench decode` and `suite`.

Not here: runs of a user's own plan and model (validate/validation.py).
"""
