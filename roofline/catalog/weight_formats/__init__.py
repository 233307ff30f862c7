"""How many bits a checkpoint holds per weight: published formats of quantization, and GGUF's tensor types.

Not here: bits that a plan chooses (planner/plan.py).
"""
