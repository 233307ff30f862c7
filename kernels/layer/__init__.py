"""What stands between a layer's products: RMSNorm, rotary embedding with the cache append, SwiGLU.

Not here: the products themselves (kernels/linear), attention (kernels/attention).
"""
