"""What a family of models writes, and what it must write: markers, calls, structured output."""
