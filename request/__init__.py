"""What a request may say: its body, parameters, items, tools and messages, and the prompt they make."""
