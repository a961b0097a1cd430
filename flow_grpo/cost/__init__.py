"""What a recipe costs, before anything is built."""
