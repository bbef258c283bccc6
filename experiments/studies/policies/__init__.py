"""Programs that train one policy in one world; the sweeps of the studies run them."""
