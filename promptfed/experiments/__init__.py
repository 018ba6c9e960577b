"""Experiments: whole federations in one process, and the protocols, tables and presets that stand on them."""
