"""What holds for all tests: none of them is judged by the clock of a machine that others use, too."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
