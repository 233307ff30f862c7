"""Costs of reading or keeping only some tokens: choosing and gathering them, and evicting a prompt's others.

Not here: how many tokens a policy chooses or keeps (planner/policies).
"""
