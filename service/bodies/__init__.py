"""What the body of a request line may hold, an endpoint a file."""
