"""Small models that alpa_lite plans and runs; ``registry.py`` lists them."""
