"""Properties of any module tree, drawn by hypothesis."""
