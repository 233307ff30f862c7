"""Kernels of KV that lies in host memory: copies and gathers that read it by address, over PCIe.

Not here: which layers lie there, and when they are copied (runtime/kv/offload).
"""
