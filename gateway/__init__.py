"""Upstream servers behind this one: load balancing, requests to them, relaying their answers, metering."""
