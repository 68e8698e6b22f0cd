"""What is said about a fault."""
