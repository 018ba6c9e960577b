"""``promptfed-emoji``, the tiny backbone trained further on emoji: see `promptfed.shared.clip.embedded`."""
