"""Carrying out tasks: data, training, evaluation, and the thread that computes."""
