"""Methods and learning rates chosen for a run file by simulation on held-out training images."""
