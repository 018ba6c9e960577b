"""What methods share: their interface, contexts, visual prompts, heads, losses and the training loop."""
