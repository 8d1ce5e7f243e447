"""Starting ranks from Python, and the command `cohort`. Private."""
