"""The rules that can be seen from outside, held against a server:

    pytest tests/wire --base-url http://host:port/v1 --model NAME [--api-key KEY] [--long JSON]

Without --base-url the server is ours, on the tiny model, and every rule must pass.
"""
