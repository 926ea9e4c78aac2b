"""What each verb does: one function per verb, no logic, nothing heavy imported before it is needed."""
