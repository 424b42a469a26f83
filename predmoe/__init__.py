"""predmoe: can a mixture-of-experts language model be trained to be predictable, and what is that worth?"""

__version__ = "0.1.0"
