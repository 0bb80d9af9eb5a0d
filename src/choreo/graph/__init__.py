"""The fragmented dataflow graph: a traced algorithm as data, with its printer and its drawing. Knows no layout."""
