"""A directory for ``PYTHONPATH``, whose ``sitecustomize`` Python imports before any code of a script."""
