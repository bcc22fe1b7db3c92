"""Base losses and consistencies, a file per family. Importing them imports no torch."""
