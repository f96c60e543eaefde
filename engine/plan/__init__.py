"""Which requests run together: pure functions and plain values, no torch."""
