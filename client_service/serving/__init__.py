"""The client's own page and API on its machine."""
