"""Examples to copy; README.md lists them."""
