"""The page. `app.py` and `decomoe serve` only call `page.serve`."""
