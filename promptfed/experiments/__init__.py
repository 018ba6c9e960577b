"""Experiments: federations in one process, and the protocols, tables and presets that use them."""
