"""A plan: the programs of all sites as plain data, with its printer, its drawing, and its export to other processes."""
