"""Federations and their rounds as plain values: no I/O, no framework."""
