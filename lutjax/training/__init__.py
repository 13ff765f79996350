"""Training: texts, optimisers for tables, loops and checkpoints."""
