"""The tables and every statement on them."""
