"""Commands for people, over the same core."""
