"""The coordinator and the simulation beside Flower's, which run in a Python of their own."""
