"""How an answer's next token is chosen from the model's scores."""
