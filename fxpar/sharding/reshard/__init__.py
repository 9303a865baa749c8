"""Changes specs: finds which reshards a plan needs, and the steps of each."""
