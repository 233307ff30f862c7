"""Answers for people: tables, text and figures."""
