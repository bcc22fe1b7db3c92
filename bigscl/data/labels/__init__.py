"""Labels of samples: those that training sees, files of labels, drawn labels, ReaL labels."""
