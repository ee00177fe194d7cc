"""What to do, given what was observed. Pure."""
