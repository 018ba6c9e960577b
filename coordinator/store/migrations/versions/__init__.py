"""One file for each form of the tables since release 0.1.0."""
