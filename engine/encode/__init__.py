"""Texts into vectors or scores: packed end to end, or padded where a model needs it."""
