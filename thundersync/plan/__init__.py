"""`python -m thundersync plan`: what a run's steps would take otherwise, and what a configuration needs.

Joins what a folder holds with `forecast`, which computes; starts nothing, loads no weights.
"""
