"""Prompts into answers, one padded batch and one decode step at a time."""
