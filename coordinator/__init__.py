"""The coordinator service: owns the global state, asks clients, admits and aggregates updates. It has no backbone."""
