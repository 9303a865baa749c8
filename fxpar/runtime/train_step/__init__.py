"""``fxpar.train_step``: forward, backward and update as one program."""
