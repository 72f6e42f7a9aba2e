"""Tables and figures of the pages, from the records. Standard library alone, so that it is fast."""
