"""What the bodies of answers look like, a file a family of endpoints."""
