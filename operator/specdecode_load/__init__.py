"""A closed-loop load generator for OpenAI-compatible servers."""
