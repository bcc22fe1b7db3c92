"""Files and object stores behind one interface."""
