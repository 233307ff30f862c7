"""`ridgeplan distill` and `ridgeplan import-head`: retrieval heads for plans that choose tokens by one.

Not here: training and files (runtime/retrieval), and the study of what heads choose (dashboards/cli/study).
"""
