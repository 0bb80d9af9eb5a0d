"""Messages between two sites: shared memory on one machine, encrypted TCP between machines."""
