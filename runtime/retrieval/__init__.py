"""Retrieval heads (SpeContext, section 4): the queries and keys of a distilled one-layer language model.

head.py computes a head's queries, keys and scores, and reads and writes heads. distill.py trains the students of
student.py, and eagle3.py imports heads that others trained. Not here: the policy that chooses by a head
(runtime/policies/retrieval_head.py).
"""
