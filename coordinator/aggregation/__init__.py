"""From updates to the next global state: shares, robust rules, the state itself."""
