"""Simulations and benches on a Ray cluster: placement, restarts and resources are Ray's, the federation is our own."""
