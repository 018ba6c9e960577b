"""Operators, their tokens, and the audit log."""
