"""The embedded stack: every part that production uses, started from installed wheels."""
