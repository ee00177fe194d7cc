"""Numbers from samples: counters, acceptance, step cost, goodput. Pure."""
