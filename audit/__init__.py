"""Holding any server against the rules: recordings, the rules, and the command `python -m audit`."""
