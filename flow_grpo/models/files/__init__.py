"""Model folders, adapters and checkpoints of others as files."""
