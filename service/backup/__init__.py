"""Backups of a home: the state of one moment, and the bytes that it names."""
