"""Rules about parent."""
