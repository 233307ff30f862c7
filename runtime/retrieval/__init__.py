"""Retrieval heads (SpeContext, section 4): the queries and keys of a distilled one-layer language model.

head.py computes a head's queries, keys and scores; file.py reads and writes heads; eagle3.py imports them; distill/
trains them. Not here: the policy that chooses by a head (runtime/policies/retrieval_head.py).
"""
