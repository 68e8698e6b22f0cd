"""All that talks to other ranks."""
