"""Decoding end to end at a large model's size with a small one's acceptance: `ridgeplan bench decode` and `suite`.

Not here: runs of a user's own plan and model (validate/validation.py).
"""
