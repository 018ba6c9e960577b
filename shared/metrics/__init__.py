"""Figures of a classifier's answers, estimates of them with intervals, and what several sites have together."""
