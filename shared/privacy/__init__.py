"""Differential privacy: accounting of its cost (`accounting`), and its source of randomness (`noise`)."""
