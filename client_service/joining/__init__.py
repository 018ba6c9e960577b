"""How a client joins: what it checks, shows to the data owner, and declares."""
