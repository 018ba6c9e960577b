"""Running services: processes, containers, GPUs and run files."""
