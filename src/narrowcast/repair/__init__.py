"""Repair: what is wrong in a checkpoint and has one right answer, written into a new one."""
