"""What rounds gave: reports, states, metrics, privacy, events, cards, replays."""
