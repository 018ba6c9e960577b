"""The operator's side of the API, for the command, the library and simulations."""
