"""``phalanx.launch()``, for notebooks: begin with ``call.py``."""
