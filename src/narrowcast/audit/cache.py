"""Rules about cache."""
