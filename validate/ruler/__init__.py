"""The 13 tasks of RULER (Hsieh et al. 2024), made here from our own words and the user's text.

What a task is made of follows the paper: needles with keys and values, chains of variables, word counts, questions over
documents. Sentences, word lists and examples are our own, so scores compare plans, not with published tables.
Not here: running models on the tasks (validate/quality).
"""
