"""Texts into vectors, one padded batch at a time."""
