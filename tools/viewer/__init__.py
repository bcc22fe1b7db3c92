"""The page of `bigscl view`: a small server over runs, and the files that a browser shows."""
