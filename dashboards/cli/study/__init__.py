"""`ridgeplan study`: measurements behind the papers' claims, on the user's model and text, one file per study.

The group is in dashboards/cli/groups.py. Not here: the measurements themselves (validate/studies).
"""
