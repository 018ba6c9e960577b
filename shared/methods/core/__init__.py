"""Common parts of methods: interface, contexts, visual prompts, heads, losses and the training loop."""
