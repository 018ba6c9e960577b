"""Simulations and benches on a Ray cluster: Ray places and restarts processes; the federation is promptfed's."""
