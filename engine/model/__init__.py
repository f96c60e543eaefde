"""What stands in a model folder, and how it becomes a model that can run."""
