"""One pass over one object: observe, decide, act."""
