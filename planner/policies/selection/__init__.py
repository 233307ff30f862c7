"""Policies that choose the tokens which drafts, or the target, read at a step; one file each, named as in plans.

Not here: policies that evict tokens (../eviction), and the fields of a policy (../policy.py).
"""
