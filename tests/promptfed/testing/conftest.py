"""These tests take the fixtures that users take, and not the coordinator of the commands' tests."""

from promptfed.testing.plugin import coordinator

__all__ = ["coordinator"]
