"""Compares a training on several workers with the same training on one, step by step."""
