"""Rules about portability."""
