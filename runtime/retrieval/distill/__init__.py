"""Training of retrieval heads: a one-layer language model learns a model's output distribution (SpeContext, 3.2).

student.py is the model that is trained, teacher.py what it learns from, attention.py the second loss, train.py the loop
and its checkpoints. Not here: what becomes of it, a head (../head.py), and the command
(dashboards/cli/retrieval).
"""
