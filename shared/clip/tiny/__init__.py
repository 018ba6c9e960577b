"""``promptfed-tiny``, pre-trained by the project: see `promptfed.shared.clip.embedded`."""
