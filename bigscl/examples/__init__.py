"""Own training loops with the memory: read them, run them, copy from them."""
