"""Hypothesis without deadlines: they measure the machine, not the code."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
