"""Proofs of exactness: streamed gradients against the one-piece gradient, on a configuration's own rollouts.

`proof` is the command (many ways, nothing committed), `audit` the check of a live step right before its commit.
"""
