"""Tuning of a plan's drafts: sparse ratio and gamma from acceptance measured on a text (SpecAttn, section 3.4).

Not here: a gamma that adapts while tokens are generated (runtime/drafting/gamma_controller.py).
"""
