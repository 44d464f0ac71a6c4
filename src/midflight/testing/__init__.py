"""Tiny models and fakes for the tests of users."""
