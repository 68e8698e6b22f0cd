"""Reasons: of operators, of what lies outside of one operator, and of reports alone."""
