"""The only code that talks to other systems; translates, never judges."""
