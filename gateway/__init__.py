"""Other servers behind this one: who is asked, what is asked, what comes back, what it costs."""
