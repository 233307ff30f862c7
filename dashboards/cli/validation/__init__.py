"""`ridgeplan validate` and `ridgeplan demo`: predictions against measurements on this machine.

Not here: measurements and comparisons (validate), the report's HTML (dashboards/validation_page.py).
"""
