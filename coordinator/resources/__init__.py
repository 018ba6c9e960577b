"""The resources of the API: each has its routes, its operations and its views side by side."""
