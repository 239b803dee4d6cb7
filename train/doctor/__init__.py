"""`python -m train doctor`: can this machine train? One check a file, each with its cure."""
