"""The rules that can be seen from outside, held against our server on the tiny model, and against others."""
