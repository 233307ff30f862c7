"""Kernels: each beside its plain-torch reference and its declared cost.

Not here: the kernels. Their folders are in kernels/ of the repository, which may be no package itself: on sys.path it
would take the place of Hugging Face's package of that name.
"""
