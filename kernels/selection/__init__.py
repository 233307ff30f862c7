"""Which tokens a sparse draft reads: scores from pages or 2-bit keys, and the choice of the best.

Not here: attention to the chosen tokens (kernels/sparse_attention), and when a policy chooses (runtime/drafting).
"""
