"""Differential privacy: what it costs (`accounting`), and the randomness that it stands on (`noise`)."""
