"""Process 1 of a sandbox, which serves its owner and starts commands: a program in C (`native/`), and one in Python."""
