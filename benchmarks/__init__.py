"""Speed and memory of planning and of what is planned; ``bench.py`` runs all of it."""
