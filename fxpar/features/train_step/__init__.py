"""Runs forward, backward and update as one program: ``fxpar.train_step``."""
