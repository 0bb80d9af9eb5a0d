"""Messages between two processes: shared memory on one machine, encrypted TCP between machines."""
