"""What a person reads about a fault."""
