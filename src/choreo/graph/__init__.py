"""The fragmented dataflow graph: a traced algorithm as data, with its printer and its drawing. It does not depend on layouts."""
