"""Real parts for the tests: what a test starts, looks at and stops."""
