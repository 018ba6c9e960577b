"""FaST-PT."""

from promptfed.shared.methods.fast_pt.method import FastPT as FastPT
