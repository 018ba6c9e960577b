"""Federations: create, steer, give an initial state, delete, view."""
