"""From token to wire: a course whose exercises are real bugs. `python -m course` begins."""
