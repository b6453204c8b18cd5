"""Measures a step of another trainer and one of ours on the same work, each in processes of its own."""
