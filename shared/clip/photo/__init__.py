"""What is the project's own of ``promptfed-photo``: see `promptfed.shared.clip.embedded`."""
