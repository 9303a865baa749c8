"""Change of spec: which reshards a plan needs, and the steps of each."""
