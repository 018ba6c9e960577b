"""The library: `promptfed.run`, `promptfed.connect`, and what they return."""
