"""Atomic files, and bounded reading and one-line display of untrusted content."""
