"""The command: one file for each of its own commands."""

from promptfed.shared.service.reasons import collect_seldom

collect_seldom()  # before all that the command imports
