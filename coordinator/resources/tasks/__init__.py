"""Clients' tasks and their answers."""
