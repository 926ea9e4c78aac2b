"""Rules about coverage."""
