"""Rules about codes."""
