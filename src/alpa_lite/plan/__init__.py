"""The artefact: what was decided, as records that save, load, compare and print. Knows no JAX.

Start at ``plan.py`` (the ``Plan``), whose parts are in ``records.py``; ``identity.py`` says which program
a plan is for.
"""
