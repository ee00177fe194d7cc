"""Wanted Kubernetes objects as plain dicts. Pure."""
