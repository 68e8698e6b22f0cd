"""Training scripts as people have them, with two lines for the guard, and no function that a recipe could name."""
