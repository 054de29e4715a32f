"""The contents of a request: body, parameters, items, tools and messages, and the prompt they make."""
