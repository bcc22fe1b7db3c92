"""Expected positives: which images show a class that their labels leave open."""
