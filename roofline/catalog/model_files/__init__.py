"""Readers of files that describe a model: a config.json, fetched from the hub where it is missing, or a GGUF file.

Not here: the sizes themselves (roofline/catalog/shapes.py), and bits per weight (roofline/catalog/weight_formats).
"""
