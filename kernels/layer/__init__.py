"""The small operations of a layer: RMSNorm, rotary embedding with the cache append, SwiGLU.

Not here: matrix products (kernels/linear) and attention (kernels/attention).
"""
