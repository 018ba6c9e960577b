"""The small backbone of the methods' own tests."""

from tests.shared.methods.conftest import backbone

__all__ = ["backbone"]
