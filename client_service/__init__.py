"""The client service: a site's worker, its private state and its own small API. Importing it imports no torch."""
