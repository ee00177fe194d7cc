"""Kopf: decorators, unpacking, error mapping, nothing else."""
