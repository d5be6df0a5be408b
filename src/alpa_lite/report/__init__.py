"""Plans for people: text with rich, later HTML and timelines. What is shown is decided in ``plan/summary.py``."""
