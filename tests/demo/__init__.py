"""The demo: the operator tunes a real engine under a changing load, then falls safely."""
