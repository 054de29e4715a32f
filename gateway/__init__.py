"""Upstream servers, whose models this one serves too: load balancing, relaying their answers, metering."""
