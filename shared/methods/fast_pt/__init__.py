"""FaST-PT."""
