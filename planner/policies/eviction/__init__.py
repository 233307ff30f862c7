"""Policies that evict tokens from the cache once, after prefill; one file each, named as in plans.

Not here: policies that only choose what a step reads (../selection), and the fields of a policy (../policy.py).
"""
