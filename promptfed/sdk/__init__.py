"""The operator's side of the API, as the command, the library and simulations use it."""
