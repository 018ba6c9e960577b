"""The text of an export's card, of the card alone: the command, the coordinator and `verify` write the same."""
