"""Caches of features and activations on the client's disk."""
